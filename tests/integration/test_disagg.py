"""A prefill and a decode server: answers are those of one server, whatever layers keep."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sylvan.protocol.requests import Bootstrap
from tests.support.prefill_decode import KINDS, Pair, Server, prompt, same, write_kind


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_kind(folder / kind.replace(" ", "-"), kind) for kind in KINDS}


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    found: list[Any] = []
    yield found
    for server in found:
        server.close()


LENGTHS = (1, 2, 15, 16, 17, 33, 48, 63, 64, 65, 100, 129, 200, 301)


def answers(ask: Any, tokens: Any, run: Any) -> dict[str, list[int]]:
    """Prompts of many lengths, some of which share a start; then all of them again."""
    names: list[str] = []
    for turn in range(2):
        for length in LENGTHS:
            names.append(f"{turn}-{length}")
            ask(names[-1], prompt(length, length))
            names.append(f"{turn}-{length}-shared")
            ask(names[-1], [*prompt(301, 301)[: length // 2], *prompt(length, 99 + turn)])
        run()
    return {name: tokens(name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["tcp", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_one_server(opened, models, kind, transfer):
    alone = Server(models[kind])
    pair = Pair(models[kind], disagg__transfer=transfer)
    opened += [alone, pair]

    def run_alone() -> None:
        while not alone.scheduler.idle:
            alone.step()

    expected = answers(alone.add, alone.tokens, run_alone)
    found = answers(pair.ask, pair.decode.tokens, pair.run)

    assert found == expected
    state = pair.decode.state()
    assert state["failed"] == state["refused"] == 0
    assert state["done"] == 2 * 2 * len(LENGTHS)
    assert state["num_bytes"] > 0
    assert pair.prefill.is_clean()
    assert pair.decode.is_clean()


@pytest.mark.parametrize("kind", ["full", "window", "recurrent"])
def test_kv_goes_through_the_store_that_both_have(opened, models, kind, tmp_path):
    store = {"tiers__storage": str(tmp_path / "store"), "tiers__prefetch_min_tokens": 1}
    alone = Server(models[kind])
    pair = Pair(models[kind], disagg__transfer="store", **store)
    opened += [alone, pair]
    prompts = {f"r{length}": prompt(length, length) for length in (3, 40, 129, 300)}
    for name, ids in prompts.items():
        alone.add(name, ids)
        pair.ask(name, ids)
    while not alone.scheduler.idle:
        alone.step()
    pair.run()

    for name in prompts:
        assert pair.decode.tokens(name) == alone.tokens(name)
    state = pair.decode.state()
    assert (state["done"], state["failed"], state["num_bytes"]) == (4, 0, 0)
    loaded = [o.usage.loaded_tokens for o in pair.decode.outputs if o.rid == "r300"]
    assert max(loaded) >= 288
    assert pair.prefill.is_clean()
    assert pair.decode.is_clean()


def test_tiers_beside_a_role_serve_what_no_prefill_server_brings(opened, models, tmp_path):
    alone = Server(models["full"])
    stores = {f"{side}_tiers__storage": str(tmp_path / side) for side in ("p", "d")} | {
        "tiers__prefetch_min_tokens": 1
    }
    pair = Pair(models["full"], **stores)
    opened += [alone, pair]
    for turn in range(3):
        for length in (40, 129, 300):
            name, ids = f"{turn}-{length}", prompt(length, length)
            alone.add(name, ids)
            if turn < 2:
                pair.ask(name, ids)
            else:
                pair.decode.add(name, ids)
        while not alone.scheduler.idle:
            alone.step()
        pair.run()
        pair.prefill.scheduler.flush_cache()
        pair.decode.scheduler.flush_cache()

    for turn in range(3):
        for length in (40, 129, 300):
            name = f"{turn}-{length}"
            assert pair.decode.tokens(name) == alone.tokens(name)
    assert pair.decode.state()["failed"] == 0
    assert max(o.usage.loaded_tokens for o in pair.decode.outputs if o.rid == "2-300") >= 288
    assert pair.prefill.is_clean()
    assert pair.decode.is_clean()


def test_roles_are_those_of_requests_where_both_are_there(opened, models):
    """As after a switch: each server does either part, even at the same time."""
    alone = Server(models["full"])
    pair = Pair(models["full"], disagg__switchable=True, d_disagg__bootstrap_port=0)
    opened += [alone, pair]
    ports = pair.prefill.state()["bootstrap_port"], pair.decode.state()["bootstrap_port"]
    assert all(ports)
    sides = pair.prefill, pair.decode
    for number in range(12):
        ids, first = prompt(60 + 17 * number, number), number % 2
        meeting = Bootstrap(host="127.0.0.1", port=ports[first], room=1000 + number)
        name = str(number)
        alone.add(name, ids)
        sides[first].add(name, ids, same(meeting, role="prefill"), max_new_tokens=1)
        sides[1 - first].add(name, ids, same(meeting, role="decode"))
    while not alone.scheduler.idle:
        alone.step()
    pair.run()

    for number in range(12):
        assert sides[1 - number % 2].tokens(str(number)) == alone.tokens(str(number))
    for side in sides:
        assert side.state()["failed"] == side.state()["refused"] == 0
        assert side.is_clean()


@contextmanager
def asked_over_http() -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The port of a prefill server whose scheduler the test steps, and what it was asked for."""
    waiting: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            waiting.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, waiting
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("retraction", ["local", "prefill"])
def test_what_is_retracted_is_computed_where_it_is_to_be(opened, models, retraction):
    alone = Server(models["full"], context_len=320)
    names = [f"r{i}" for i in range(6)]
    with asked_over_http() as (port, asked):
        pair = Pair(
            models["full"],
            disagg__retraction=retraction,
            context_len=320,
            d_cache__max_tokens=320,
            p_server__port=port,  # as if it listened there
        )
        opened += [alone, pair]
        for number, name in enumerate(names):
            alone.add(name, prompt(40 + number, number), max_new_tokens=120)
            pair.ask(name, prompt(40 + number, number), max_new_tokens=120)
        while not alone.scheduler.idle:
            alone.step()
        served = 0

        def done() -> bool:
            nonlocal served
            for body in asked[served:]:
                meeting = Bootstrap("127.0.0.1", pair.port, body["bootstrap_room"])
                pair.prefill.add(f"again{served}", body["input_ids"], meeting, max_new_tokens=1)
                served += 1
            return pair.decode.scheduler.idle and pair.prefill.scheduler.idle

        pair.run(done)

    assert pair.decode.scheduler.load().retractions > 0
    for name in names:
        assert pair.decode.tokens(name) == alone.tokens(name)
    assert (pair.decode.state()["again"] > 0) == (retraction == "prefill")
    assert bool(asked) == (retraction == "prefill")
    assert pair.prefill.is_clean()
    assert pair.decode.is_clean()
