from __future__ import annotations

import pytest

from sylvan.config.route import HealthConfig
from sylvan.gateway.errors import NoWorkerError, UnknownModelError
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.ring import HashRing
from sylvan.gateway.workers.spec import normal_url
from sylvan.protocol.errors import RequestError
from sylvan.utils.clock import VirtualClock
from tests.support.gateway import make_worker

STRICT = HealthConfig(failures=1)


@pytest.fixture
def registry():
    return Registry()


def add(registry, number, models=("m",), **spec):
    worker = make_worker(number, VirtualClock(), **spec)
    worker.found.models = models
    registry.add(worker)
    return worker


def urls(workers):
    return [worker.url for worker in workers]


def test_only_available_workers_are_candidates(registry):
    workers = [add(registry, i) for i in range(4)]
    workers[0].record_health(False, STRICT)
    workers[1].drain()
    for _ in range(10):
        workers[2].breaker.failed()

    assert registry.candidates("m") == [workers[3]]


def test_models_are_distinguished(registry):
    a, b = add(registry, 0, ("a",)), add(registry, 1, ("b", "c"))

    assert registry.candidates("a") == [a]
    assert registry.candidates("c") == [b]
    assert registry.candidates("a:adapter") == [a]
    assert registry.models == ("a", "b", "c")


def test_an_unknown_model_is_named_with_those_there_are(registry):
    add(registry, 0, ("a",))
    add(registry, 1, ("b",))

    with pytest.raises(UnknownModelError, match="'x' does not exist; there are a, b") as caught:
        registry.candidates("x")
    assert caught.value.status == 404

    with pytest.raises(UnknownModelError, match="model must be given") as caught:
        registry.candidates(None)
    assert caught.value.status == 400


def test_workers_of_one_model_take_any_name_as_one_worker_does(registry):
    add(registry, 0)
    add(registry, 1)

    assert len(registry.candidates("whatever")) == 2
    assert len(registry.candidates(None)) == 2


def test_a_worker_that_does_not_tell_its_models_takes_any(registry):
    known, silent = add(registry, 0, ("a",)), add(registry, 1, ())

    assert registry.candidates("a") == [known, silent]
    assert registry.candidates(None) == [known, silent]


def test_kinds_and_connections_are_distinguished(registry):
    prefill = add(registry, 0, worker_type="prefill")
    plain = add(registry, 1)

    assert registry.candidates("m", "prefill") == [prefill]
    assert registry.candidates("m", "regular", "http") == [plain]
    with pytest.raises(NoWorkerError, match="no decode worker of model 'm'"):
        registry.candidates("m", "decode")


def test_those_to_avoid_are_taken_if_there_are_no_others(registry):
    first, second = add(registry, 0), add(registry, 1)

    assert registry.candidates("m", avoid={first.id}) == [second]
    assert registry.candidates("m", avoid={first.id, second.id}) == [first, second]


def test_lower_priorities_wait_for_the_higher_ones_to_fail(registry):
    high, low = add(registry, 0, priority=80), add(registry, 1, priority=10)

    assert registry.candidates("m") == [high]
    high.record_health(False, STRICT)
    assert registry.candidates("m") == [low]


def test_none_available_says_how_many_are_healthy(registry):
    add(registry, 0).drain()
    add(registry, 1).record_health(False, STRICT)

    with pytest.raises(NoWorkerError, match="1 of 2 are healthy"):
        registry.candidates("m")


def test_removed_workers_are_no_candidates_and_listeners_are_called(registry):
    gone: list[str] = []
    registry.on_remove.append(lambda worker: gone.append(worker.url))
    first, second = add(registry, 0), add(registry, 1)
    registry.candidates("m")

    registry.remove(first)
    registry.remove(first)

    assert registry.candidates("m") == [second]
    assert gone == [first.url]
    assert registry.by_url(first.url) is None
    assert first not in registry
    assert second in registry


def test_keys_stay_with_their_worker_when_another_leaves():
    ring = HashRing()
    for name in "abcdefgh":
        ring.add(name)
    keys = [b"%d" % i for i in range(2000)]
    before = {key: next(ring.walk(key)) for key in keys}

    ring.remove("c")

    after = {key: next(ring.walk(key)) for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "c")
    assert "c" not in after.values()
    shares = [list(before.values()).count(name) for name in "abcdefgh"]
    assert max(shares) < 2 * min(shares)


def test_a_walk_names_each_member_once():
    ring = HashRing()
    for name in "abc":
        ring.add(name)

    assert sorted(ring.walk(b"key")) == ["a", "b", "c"]
    assert list(HashRing().walk(b"key")) == []


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("http://A:80/", "http://a:80"),
        ("https://host", "https://host"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("grpc://h:1", "grpc://h:1"),
    ],
)
def test_addresses_have_one_spelling(given, wanted):
    assert normal_url(given) == wanted


@pytest.mark.parametrize(
    "given",
    ["", "host:80", "ftp://h", "http://", "http://h/path", "http://h?x=1", "http://u:p@h",
     "http://h:99999", "http://[::1"],
)  # fmt: skip
def test_what_is_no_address_is_refused(given):
    with pytest.raises(RequestError, match="url") as caught:
        normal_url(given)
    assert caught.value.param == "url"
