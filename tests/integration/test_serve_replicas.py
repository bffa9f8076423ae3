"""`sylvan serve --dp N`: real servers behind a gateway, started, lost and stopped together."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from tests.support.tiny import write_model

START_S = 120
FLAGS = ("--load-format", "dummy", "--device", "cpu", "--dtype", "float32")
FLAGS = (*FLAGS, "--max-total-tokens", "16Ki")
KEY = {"authorization": "Bearer sesame"}
"""Given to servers that want none, too."""
LONG = {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True, "seed": 7, "stream": True}


def command(*words):
    return [sys.executable, "-m", "sylvan", "serve", *map(str, words)]


def refused(*words, **options):
    done = subprocess.run(
        command(*words), check=False, capture_output=True, text=True, timeout=START_S, **options
    )
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@contextlib.contextmanager
def serving(model, *flags):
    words = command(model, *FLAGS, "--port", 0, *flags)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"Sylvan serves tiny at (\S+) \(", line):
                yield process, found[1]
                break
        else:
            pytest.fail("the servers did not start")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
        process.stdout.close()


def replicas_of(process):
    """The API process of each replica, in order of the numbers of their configuration files."""
    found = {}
    for child in psutil.Process(process.pid).children():
        words = child.cmdline()
        if "--share-port" in words:
            found[words[words.index("--config") + 1]] = child
    return [found[path] for path in sorted(found)]


def workers(url):
    return httpx.get(f"{url}/workers", headers=KEY).json()["workers"]


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.05)


def kill_busy(process, url, kind="regular"):
    """Kill a replica of a kind that serves something; False: all have served already."""
    busy = [w["url"] for w in workers(url) if w["load"] and w["worker_type"] == kind]
    port = int(busy[0].rpartition(":")[2]) if busy else 0
    for child in replicas_of(process):
        if any(c.laddr.port == port for c in child.net_connections("tcp")):
            child.kill()
            return True
    return False


def interrupted(stream, kill):
    """The events of a stream whose server is killed meanwhile; retried until a kill is in time."""
    kills = []
    for _ in range(10):
        found = stream(lambda: kills.append(kill()))
        if kills[-1]:
            return found
    pytest.fail("each stream was over before its server could be killed")


def text_of(url, act=None):
    """The text of a stream; `act` is called after a few events."""
    parts = []
    path = f"{url}/v1/completions"
    with httpx.stream("POST", path, json=LONG, headers=KEY, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                parts.append(event["choices"][0]["text"])
                if act is not None and len(parts) == 5:
                    act()
    assert line == "data: [DONE]" or parts
    return "".join(parts)


def keys_are_those_of_the_gateway(url):
    body = {"prompt": "abc", "max_tokens": 2}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
    for _ in range(2):
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=60)
        assert answer.status_code == 200
    shown = httpx.get(f"{url}/get_server_info", headers=KEY).json()
    assert shown["gateway"]["settings"]["routing"]["policy"] == "round_robin"
    assert "sesame" not in json.dumps(shown)


@pytest.mark.slow
def test_replicas_are_served_lost_and_stopped_as_one(model):
    flags = ("--dp", 2, "--api-key", "sesame", "--router-policy", "round_robin")
    with serving(model, *flags) as (process, url):
        keys_are_those_of_the_gateway(url)
        first, second = replicas_of(process)
        mine = [first, second, *first.children(recursive=True), *second.children(recursive=True)]
        folder = os.path.dirname(first.cmdline()[first.cmdline().index("--config") + 1])
        assert oct(os.stat(folder).st_mode)[-3:] == "700"
        known = workers(url)
        assert [w["is_healthy"] for w in known] == [True, True]
        assert all(w["continues_streams"] for w in known)
        direct = httpx.post(f"{known[0]['url']}/v1/completions", json={"prompt": "x"})
        assert direct.status_code == 401

        expected = text_of(url)

        found = interrupted(lambda act: text_of(url, act), lambda: kill_busy(process, url))
        assert found == expected
        until(lambda: [w["is_healthy"] for w in workers(url)] == [True, True])
        again = replicas_of(process)
        assert len({c.pid for c in again} - {first.pid, second.pid}) == 1
        mine += [*again, *(c for child in again for c in child.children(recursive=True))]
        assert text_of(url) == expected

        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        until(lambda: not any(c.is_running() for c in mine))
        assert not os.path.exists(folder)


@pytest.mark.slow
def test_a_server_that_does_not_start_ends_the_command(model, tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    code, errors = refused(folder, "--device", "cpu", "--dp", 2, "--port", 0)
    assert code == 2
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--dp", 2, "--server.root-path", "/x"), "server.root_path: not with server.replicas=2"),
        (("--dp", 0), "--dp"),
        (("--router-policy", "random"), "--router-policy: it needs --dp"),
        (("--dp", 2, "--router-policy", "best"), "'best'"),
        (("--register", "http://h:1", "--host", "0.0.0.0"), "server.register_url"),
    ],
)
def test_what_cannot_work_is_refused(model, flags, reason):
    code, errors = refused(model, *FLAGS, "--port", 0, *flags)
    assert code == 2
    assert reason in errors


def test_settings_of_the_gateway_that_the_server_has_are_refused(model, tmp_path):
    file = tmp_path / "route.yaml"
    file.write_text("server: {port: 1}\n")
    code, errors = refused(model, *FLAGS, "--dp", 2, "--port", 0, "--router-config", file)
    assert code == 2
    assert "server.port" in errors
