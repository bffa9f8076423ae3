"""A server under a service manager: the inherited socket, and the notifications that it sends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.support.tiny import write_model

PATIENCE_S = 90
ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@contextlib.contextmanager
def started(given: socket.socket, address: str, *words: str):
    """`sylvan` with a socket as file descriptor 3, as systemd starts it."""
    command = [sys.executable, "-c", ACTIVATE, str(given.fileno()), "-m", "sylvan", *words]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"NOTIFY_SOCKET": address},
        pass_fds=(given.fileno(),),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def manager(tmp_path: Path):
    """Notifications that a service manager receives."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(PATIENCE_S)
        yield sock


def test_clients_wait_on_the_given_socket_until_the_server_is_ready(tmp_path, manager):
    model = str(write_model(tmp_path / "model"))
    address = str(tmp_path / "notify")
    flags = ["--load-format", "dummy", "--device", "cpu", "--threads", "1", "--processes", "one"]
    with socket.create_server(("127.0.0.1", 0)) as given:
        port = given.getsockname()[1]
        replies: list[httpx.Response] = []

        def ask() -> None:
            url = f"http://127.0.0.1:{port}/v1/models"
            replies.append(httpx.get(url, timeout=PATIENCE_S))

        early = threading.Thread(target=ask)
        early.start()
        with started(given, address, "serve", model, "--port", str(port), *flags) as process:
            assert manager.recv(100) == b"READY=1"
            early.join(PATIENCE_S)
            assert [reply.status_code for reply in replies] == [200]
            process.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert process.wait(PATIENCE_S) == 0
            assert process.stdout is not None
            assert f"http://127.0.0.1:{port}" in process.stdout.read()


def test_a_gateway_takes_a_given_socket_and_says_that_it_is_ready(tmp_path, manager):
    address = str(tmp_path / "notify")
    with socket.create_server(("127.0.0.1", 0)) as given:
        port = given.getsockname()[1]
        flags = ["--port", str(port), "--observe.metrics-port", "none"]
        with started(given, address, "route", *flags) as process:
            assert manager.recv(100) == b"READY=1"
            assert httpx.get(f"http://127.0.0.1:{port}/live").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert manager.recv(100) == b"STOPPING=1"
            assert process.wait(PATIENCE_S) == 0


def test_a_socket_that_listens_elsewhere_is_refused(tmp_path):
    """Who may call a server depends on where it listens, so the two must agree."""
    with socket.create_server(("0.0.0.0", 0)) as given:
        port = given.getsockname()[1]
        with started(given, "", "route", "--port", str(port)) as process:
            output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert f"127.0.0.1:{port}" in output
    assert f"0.0.0.0:{port}" in output


def test_a_file_that_is_no_socket_is_refused(tmp_path):
    with socket.socket() as unready, started(unready, "", "route") as process:
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "LISTEN_FDS: file descriptor 3 is not a listening TCP socket" in output


def heard(manager: socket.socket) -> list[str]:
    """Notifications of a reload, up to `READY=1`."""
    lines: list[str] = []
    while "READY=1" not in lines:
        lines += manager.recv(100).decode().splitlines()
    return lines


def test_a_hangup_reads_keys_and_limits_of_a_gateway_again(tmp_path, manager):
    """As `systemctl reload` does; what needs a restart is named, a broken file changes nothing."""
    file = tmp_path / "route.yaml"
    with socket.create_server(("127.0.0.1", 0)) as given:
        port = given.getsockname()[1]

        def write(key: str, size: int) -> None:
            settings = {
                "server": {"port": port, "api_key": key},
                "limits": {"queue_size": size},
                "routing": {"policy": "random" if size == 3 else "round_robin"},
                "failover": {"wait_s": 20 + size},
                "observe": {"metrics_port": None},
            }
            file.write_text(json.dumps(settings))

        def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            url = f"http://127.0.0.1:{port}/v1/models"
            return httpx.get(url, headers=headers, timeout=PATIENCE_S).status_code

        write("old", 2)
        address = str(tmp_path / "notify")
        with started(given, address, "route", "--config", str(file)) as process:
            assert manager.recv(100) == b"READY=1"
            assert (status("old"), status("new")) == (200, 401)
            write("new", 3)
            process.send_signal(signal.SIGHUP)
            assert heard(manager)[0] == "RELOADING=1"
            assert (status("old"), status("new")) == (401, 200)
            file.write_text("{")
            process.send_signal(signal.SIGHUP)
            heard(manager)
            assert (status("old"), status("new")) == (401, 200)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            assert process.stdout is not None
            said = process.stdout.read()
    changed = "server.api_key, routing.policy, limits.queue_size"
    assert f"SIGHUP: keys reloaded; {changed} changed" in said
    assert "SIGHUP: these need a restart: failover.wait_s" in said
    assert "SIGHUP: nothing has changed: " in said
