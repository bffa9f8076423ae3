from __future__ import annotations

import socket

import pytest

from sylvan.cli.listen import bind, free_port
from sylvan.config.tree import ServerConfig
from sylvan.protocol.errors import ConfigError


def server(**values):
    return ServerConfig(**({"host": "127.0.0.1", "port": 0} | values))


def test_port_0_takes_a_free_one():
    with bind(server()) as sock:
        assert sock.getsockname()[1] > 0


def test_taken_port_names_a_free_one():
    with bind(server()) as sock:
        port = sock.getsockname()[1]

        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken; port") as error:
            bind(server(port=port))

        free = free_port("127.0.0.1", port)
        assert free != port
        assert "--port" in str(error.value)


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_bad_hosts_are_refused(host):
    with pytest.raises(ConfigError, match=r"server\.host"):
        bind(server(host=host))


def test_unix_socket_of_a_dead_server_is_removed(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    assert bind(server(uds=str(path))) is None
    assert not path.exists()


def test_unix_socket_of_a_live_server_is_refused(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()

        with pytest.raises(ConfigError, match="another server listens"):
            bind(server(uds=str(path)))


def test_other_files_are_never_removed(tmp_path):
    path = tmp_path / "s"
    path.write_text("mine")

    with pytest.raises(ConfigError, match="is not a socket"):
        bind(server(uds=str(path)))
    with pytest.raises(ConfigError, match="no directory"):
        bind(server(uds=str(tmp_path / "none" / "s")))
    with pytest.raises(ConfigError, match="too long"):
        bind(server(uds=str(tmp_path / ("x" * 101))))
    assert path.read_text() == "mine"
