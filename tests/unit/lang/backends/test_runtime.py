from __future__ import annotations

import socket

import pytest

from sylvan.lang.backends.runtime import flags, free_port
from sylvan.lang.errors import BackendError


def test_keywords_become_flags():
    options = {"tp_size": 2, "disable_radix_cache": True, "api_key": None, "quiet": False}
    assert flags("dir", options) == ["dir", "--tp-size", "2", "--disable-radix-cache"]
    assert flags(None, {}) == []


def test_a_port_in_use_is_passed_over():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if port < 40000:
            assert free_port("127.0.0.1", port) > port
    with pytest.raises(BackendError, match="no free port"):
        free_port("127.0.0.1", 40000)
