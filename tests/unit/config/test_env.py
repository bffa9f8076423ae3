"""What children get of the environment."""

from __future__ import annotations

from sylvan.config.env import for_compute


def test_children_get_no_settings_and_no_keys(monkeypatch):
    monkeypatch.setenv("SYLVAN_SERVER__API_KEY", "secret-of-a-client")
    monkeypatch.setenv("SYLVAN_SEED", "5")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("AWS_PROFILE", "of another program")
    found = for_compute()

    assert not [name for name in found if name.startswith("SYLVAN_")]
    assert (found["OMP_WAIT_POLICY"], found["AWS_PROFILE"]) == ("ACTIVE", "of another program")
