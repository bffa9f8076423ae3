from __future__ import annotations

import pytest

from sylvan.config.fields import replaced
from sylvan.config.live import KEPT_ENTRIES, LiveSettings
from sylvan.config.schema import SERVE
from sylvan.config.tree import Config
from sylvan.config.values import Secret
from sylvan.protocol.errors import ConfigError

PATHS = ("limits.samples", "server.api_key", "server.max_body_bytes")


class Server:
    """Settings that change, what they are read from, and the part that takes them."""

    def __init__(self):
        self.sources = Config()
        self.live = LiveSettings(SERVE, Config(), PATHS, lambda: self.sources, lambda: 7.0)
        self.taken = []
        self.live.add(self._part)

    def _part(self, config):
        if config.limits.samples == 13:
            raise ConfigError("limits.samples: not 13")
        return lambda: self.taken.append(config.limits.samples)


@pytest.fixture
def server():
    return Server()


def changes(entry):
    return [(change.path, change.old, change.new) for change in entry.changes]


def test_a_change_takes_effect_and_is_in_the_journal(server):
    entry = server.live.change({"limits": {"samples": "8"}}, "me")

    assert changes(entry) == [("limits.samples", 4096, 8)]
    assert (entry.number, entry.at, entry.cause) == (1, 7.0, "me")
    assert server.live.now.limits.samples == 8
    assert server.taken == [8]
    assert server.live.journal == (entry,)


def test_a_dry_run_says_the_same_and_changes_nothing(server):
    planned = server.live.change({"limits": {"samples": 8}}, "me", dry_run=True)

    assert server.live.now == Config()
    assert not server.taken
    assert not server.live.journal
    assert planned == server.live.change({"limits": {"samples": 8}}, "me")


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({"limits": {"sample": 1}}, "limits.sample: no such setting .did you mean limits.samples"),
        ({"limits": {"samples": 0}}, "limits.samples: expected"),
        ({"server": {"port": 1}}, "server.port: cannot change while the server runs"),
        ({"scheduler": {"policy": "fcfs"}}, "scheduler.policy: cannot change"),
        ({"limits": {"samples": 13}}, "not 13"),
    ],
)
def test_what_cannot_be_changes_nothing(server, tree, why):
    tree = {**tree, "server": {**tree.get("server", {}), "max_body_bytes": 4096}}

    with pytest.raises(ConfigError, match=why):
        server.live.change(tree, "me")

    assert server.live.now == Config()
    assert not server.taken
    assert not server.live.journal


def test_sources_are_read_again_and_what_needs_a_restart_is_named(server):
    server.sources = replaced(Config(), {"limits.samples": 3, "server.port": 9})

    entry = server.live.reread("SIGHUP")

    assert changes(entry) == [("limits.samples", 4096, 3)]
    assert entry.restart == ("server.port",)
    assert server.live.now.server.port == Config().server.port


def test_every_state_of_the_journal_can_be_gone_back_to(server):
    server.live.change({"limits": {"samples": 1}}, "me")
    server.live.change({"limits": {"samples": 2}, "server": {"max_body_bytes": 4096}}, "me")

    back = server.live.revert(1, "me")
    assert changes(back) == [
        ("server.max_body_bytes", 4096, 32 << 20),
        ("limits.samples", 2, 1),
    ]
    server.live.revert(0, "me")
    assert server.live.now == Config()
    with pytest.raises(ConfigError, match="entry 9 is not in the journal"):
        server.live.revert(9, "me")


def test_the_journal_is_bounded(server):
    for number in range(KEPT_ENTRIES + 10):
        server.live.change({"limits": {"samples": number + 20}}, "me")

    assert len(server.live.journal) == KEPT_ENTRIES
    assert next(entry.number for entry in server.live.journal) == 11
    server.live.revert(0, "me")
    with pytest.raises(ConfigError, match="not in the journal"):
        server.live.revert(5, "me")


def test_secrets_are_never_shown(server):
    entry = server.live.change({"server": {"api_key": "a-secret"}}, "me")

    assert changes(entry) == [("server.api_key", None, "***")]
    assert server.live.now.server.api_key == Secret("a-secret")
