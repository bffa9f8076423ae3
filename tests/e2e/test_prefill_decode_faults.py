"""One of two servers stops or dies while it computes or sends: the other one frees all memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import Server, running
from tests.e2e.test_prefill_decode import FLAGS, free_port, generate
from tests.support.tiny import write_model

pytestmark = pytest.mark.slow
TIMEOUT = ("--disagg.timeout-s", "3")
LONG = "The quick brown fox jumps over the lazy dog. " * 60
ROOMS = itertools.count(10**6)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(params=["tcp", "shm"])
def flags(request) -> tuple[str, ...]:
    return (*FLAGS, *TIMEOUT, "--disaggregation-transfer-backend", request.param)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def prefill(stack: ExitStack, model: str, port: int, flags: tuple[str, ...]) -> Server:
    role = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    return stack.enter_context(running(model, *flags, *role))


def decode(stack: ExitStack, model: str, flags: tuple[str, ...]) -> Server:
    return stack.enter_context(running(model, *flags, "--disaggregation-mode", "decode"))


def tree(server: Server) -> list[psutil.Process]:
    own = psutil.Process(server.process.pid)
    return [own, *own.children(recursive=True)]


def suspend(server: Server) -> None:
    for process in tree(server):
        process.suspend()


def resume(server: Server) -> None:
    for process in tree(server):
        process.resume()


def queues(server: Server) -> dict[str, Any]:
    reply = httpx.get(server.url + "/v1/loads?include=all", timeout=60).json()
    return reply["loads"][0]["disaggregation"]


def requests_seen(server: Server) -> int:
    found = httpx.get(server.url + "/requests", timeout=60).json()
    return len(found["running"]) + len(found["requests"])


def until(ask: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not ask():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


class Asking:
    """One request of both."""

    def __init__(self, first: Server, second: Server, port: int, text: str) -> None:
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
        body = {**generate(text, temperature=0), **place, "bootstrap_room": next(ROOMS)}
        self._pool = ThreadPoolExecutor(2)

        def post(server: Server) -> httpx.Response | httpx.HTTPError:
            try:
                return httpx.post(server.url + "/generate", json=body, timeout=120)
            except httpx.HTTPError as error:
                return error

        self.prefill: Future[Any] = self._pool.submit(post, first)
        self.decode: Future[Any] = self._pool.submit(post, second)


def alone(server: Server, text: str) -> list[int]:
    body = generate(text, temperature=0)
    return httpx.post(server.url + "/generate", json=body, timeout=120).json()["output_ids"]


def test_a_prefill_server_that_stops(stack, model, flags):
    port = free_port()
    first, second = prefill(stack, model, port, flags), decode(stack, model, flags)
    suspend(first)
    try:
        asking = Asking(first, second, port, LONG)
        found = asking.decode.result(100)
    finally:
        resume(first)
    assert found.json()["output_ids"] == alone(second, LONG)
    assert asking.prefill.result(100).status_code == 200
    until(lambda: queues(first)["prefill_bootstrap_queue_reqs"] == 0)
    after = Asking(first, second, port, LONG + "after")
    assert after.decode.result(100).json()["output_ids"] == alone(second, LONG + "after")


def test_a_decode_server_that_stops(stack, model, flags):
    port = free_port()
    first, second = prefill(stack, model, port, flags), decode(stack, model, flags)
    suspend(second)
    try:
        asking = Asking(first, second, port, LONG)
        assert asking.prefill.result(100).status_code == 200
        until(lambda: sum(v for k, v in queues(first).items() if k.endswith("queue_reqs")) == 0)
    finally:
        resume(second)
    found = asking.decode.result(100)
    assert found.json()["output_ids"] == alone(second, LONG)
    until(lambda: queues(second)["decode_transfer_queue_reqs"] == 0)


def test_a_prefill_server_that_dies_and_is_replaced(stack, model, flags):
    port = free_port()
    first, second = prefill(stack, model, port, flags), decode(stack, model, flags)
    asking = [Asking(first, second, port, f"{i} " + LONG) for i in range(4)]
    first.kill()
    for number, each in enumerate(asking):
        assert each.decode.result(100).json()["output_ids"] == alone(second, f"{number} " + LONG)
    until(lambda: sum(v for k, v in queues(second).items() if k.endswith("queue_reqs")) == 0)

    again = prefill(stack, model, port, flags)
    after = Asking(again, second, port, LONG + "after")
    assert after.decode.result(100).json()["output_ids"] == alone(second, LONG + "after")


def test_a_decode_server_that_dies_and_restarts(stack, model, flags):
    port = free_port()
    first, second = prefill(stack, model, port, flags), decode(stack, model, flags)
    asking = [Asking(first, second, port, f"{i} " + LONG) for i in range(4)]
    second.kill()
    for each in asking:
        assert each.prefill.result(100).status_code == 200
    until(lambda: sum(v for k, v in queues(first).items() if k.endswith("queue_reqs")) == 0)

    again = decode(stack, model, flags)
    after = Asking(first, again, port, LONG + "after")
    assert after.decode.result(100).json()["output_ids"] == alone(first, LONG + "after")


def test_roles_are_switched_while_requests_are_served(stack, model):
    ports = free_port(), free_port()
    both = (*FLAGS, "--enable-pd-role-switch")
    first = prefill(stack, model, ports[0], both)
    second = stack.enter_context(
        running(
            model,
            *both,
            *("--disaggregation-mode", "decode"),
            *("--disaggregation-bootstrap-port", str(ports[1])),
        )
    )
    before = Asking(first, second, ports[0], LONG)
    until(lambda: requests_seen(first) and requests_seen(second))  # they arrive before the switch

    for server, role in ((first, "decode"), (second, "prefill")):
        dry = {"new_role": role, "prepare_only": True}
        assert httpx.post(server.url + "/pd_role_switch", json=dry).json()["success"]
        reply = httpx.post(server.url + "/pd_role_switch", json={"new_role": role})
        assert reply.status_code == 200
        assert reply.json()["new_role"] == role
        info = httpx.get(server.url + "/get_server_info", timeout=60).json()
        assert info["internal_states"][0]["disaggregation_mode"] == role

    after = Asking(second, first, ports[1], LONG + "after")
    expected = [alone(first, LONG), alone(first, LONG + "after")]
    assert before.decode.result(100).json()["output_ids"] == expected[0]
    assert after.decode.result(100).json()["output_ids"] == expected[1]
    assert after.prefill.result(100).json()["output_ids"] == expected[1][:1]


def test_a_server_that_was_not_started_for_it_switches_nothing(stack, model):
    server = decode(stack, model, FLAGS)
    reply = httpx.post(server.url + "/pd_role_switch", json={"new_role": "prefill"})
    assert reply.status_code == 400
    assert "--enable-pd-role-switch" in reply.json()["message"]
    wrong = httpx.post(server.url + "/pd_role_switch", json={"new_role": "both"})
    assert wrong.status_code == 400
    assert "new_role" in wrong.text
