"""The environment of child processes."""

from __future__ import annotations

import os

from sylvan.config.env import for_compute, given_sockets


def test_children_get_no_settings_and_no_keys(monkeypatch):
    monkeypatch.setenv("SYLVAN_SERVER__API_KEY", "secret-of-a-client")
    monkeypatch.setenv("SYLVAN_SEED", "5")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("AWS_PROFILE", "of another program")
    found = for_compute()

    assert not [name for name in found if name.startswith("SYLVAN_")]
    assert (found["OMP_WAIT_POLICY"], found["AWS_PROFILE"]) == ("ACTIVE", "of another program")


def test_sockets_belong_to_the_process_that_they_were_opened_for():
    mine = {"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid())}

    assert list(given_sockets(mine)) == [3, 4]
    assert not given_sockets(mine | {"LISTEN_PID": "1"})
    assert not given_sockets(mine | {"LISTEN_FDS": "some"})
    assert not given_sockets({})
