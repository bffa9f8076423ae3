from __future__ import annotations

import threading

import pytest

from sylvan.lang.backends._http import HttpClient
from sylvan.lang.cancel import CancelScope
from sylvan.lang.errors import BackendError, ProgramCancelledError, ProgramTimeoutError
from tests.support.wire import Events, Status, serving


def test_calls_send_json_and_return_it():
    with serving(lambda asked: {"got": asked.body}) as server:
        client = HttpClient(server.url + "/base/", api_key="k")
        assert client.call("POST", "/p", {"a": [1]}) == {"got": {"a": [1]}}
        client.close()

    asked = server.asked[0]
    assert (asked.method, asked.path) == ("POST", "/base/p")
    assert asked.headers["Authorization"] == "Bearer k"
    assert asked.headers["Content-Type"] == "application/json; charset=utf-8"


def test_connections_are_kept_and_used_again():
    ports = set()

    with serving(lambda asked: {}) as server:
        client = HttpClient(server.url)
        for _ in range(3):
            client.call("GET", "/")
            ports.add(client._kept[-1].connection.sock.getsockname()[1])
        client.close()

    assert len(ports) == 1


def test_a_kept_connection_that_the_server_closed_is_replaced():
    with serving(lambda asked: {"n": 1}) as server:
        client = HttpClient(server.url)
        client.call("GET", "/")
        client._kept[-1].connection.sock.shutdown(2)  # as a server does after its keep-alive time
        assert client.call("GET", "/") == {"n": 1}
        client.close()


def test_events_are_yielded_as_they_come():
    wait = threading.Event()
    events = Events([(None, {"i": 0}), (None, {"i": 1})], wait=wait)
    with serving(lambda asked: events) as server:
        client = HttpClient(server.url)
        stream = client.stream("POST", "/", {})
        assert next(stream) == {"i": 0}
        wait.set()
        assert list(stream) == [{"i": 1}]
        assert len(client._kept) == 1
        client.close()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"object": "error", "message": "bad field"}, "bad field"),
        ({"error": "wrong type"}, "wrong type"),
        ("plain", "plain"),
    ],
)
def test_error_answers_become_errors_with_status_and_message(body, text):
    with serving(lambda asked: Status(400, body)) as server:
        client = HttpClient(server.url)
        with pytest.raises(BackendError, match=text) as caught:
            client.call("POST", "/generate", {})
        client.close()
    assert caught.value.status == 400


def test_unreachable_servers_are_named():
    with serving(lambda asked: {}) as server:
        pass
    with pytest.raises(BackendError, match=r"cannot reach the server at 127\.0\.0\.1"):
        HttpClient(server.url).call("GET", "/")
    with pytest.raises(ValueError, match="base_url"):
        HttpClient("ftp://host")


def test_cancel_breaks_off_a_call_and_the_server_notices():
    scope, wait = CancelScope(), threading.Event()
    answer = Events([(None, {"i": i}) for i in range(3)], wait=wait)

    with serving(lambda asked: answer) as server:
        client = HttpClient(server.url)
        stream = client.stream("POST", "/", {}, scope)
        next(stream)
        threading.Timer(0.01, scope.cancel).start()
        with pytest.raises(ProgramCancelledError):
            list(stream)
        wait.set()
        client.close()


def test_cancel_before_the_answer_breaks_off_too():
    scope, reached, wait = CancelScope(), threading.Event(), threading.Event()

    def answer(asked):
        reached.set()
        wait.wait(10)
        return {}

    with serving(answer) as server:
        client = HttpClient(server.url)

        def cancel():
            reached.wait(10)
            scope.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(ProgramCancelledError):
            client.call("POST", "/", {}, scope)
        thread.join()
        wait.set()
        assert client._kept == []


def test_deadlines_and_silence_end_calls():
    import time

    wait = threading.Event()
    with serving(lambda asked: (wait.wait(10), {})[1]) as server:
        client = HttpClient(server.url, timeout_s=0.02)
        with pytest.raises(BackendError, match="in time"):
            client.call("GET", "/")
        scope = CancelScope(deadline=time.monotonic() + 0.02)
        with pytest.raises((ProgramTimeoutError, BackendError)):
            HttpClient(server.url).call("GET", "/", None, scope)
        wait.set()
