"""Messages between machines, whose clocks differ."""

from __future__ import annotations

import typing

import pytest

from sylvan.protocol.nodes import ToHead, ToNode
from sylvan.runtime.executor.ranks import FromRank, ToRank

KINDS = [kind for union in (ToHead, ToNode, ToRank, FromRank) for kind in typing.get_args(union)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_message_has_a_time_of_the_sender(kind):
    """A machine counts the age of a heartbeat from when it comes, by its own clock."""
    hints = typing.get_type_hints(kind)
    assert not {name for name in hints if name.endswith("_s") or "time" in name}
    assert float not in hints.values()
