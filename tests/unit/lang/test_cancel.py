from __future__ import annotations

import time

import pytest

from sylvan.lang.cancel import CancelScope
from sylvan.lang.errors import ProgramCancelledError, ProgramTimeoutError


def test_cancel_reaches_children_but_not_parents():
    parent = CancelScope()
    child, other = parent.child(), parent.child()

    child.cancel()
    assert (parent.cancelled, child.cancelled, other.cancelled) == (False, True, False)

    parent.cancel()
    assert other.cancelled
    with pytest.raises(ProgramCancelledError):
        other.check()


def test_child_of_a_cancelled_scope_is_cancelled():
    parent = CancelScope()
    parent.cancel()
    assert parent.child().cancelled


def test_deadline_is_inherited_and_checked():
    parent = CancelScope(deadline=time.monotonic() - 1)
    child = parent.child()
    with pytest.raises(ProgramTimeoutError):
        child.check()
    assert child.remaining_s() == 1e-3
    assert CancelScope().remaining_s() is None


def test_on_cancel_calls_back_only_inside_the_block():
    scope, calls = CancelScope(), []
    with scope.on_cancel(lambda: calls.append(1)):
        pass
    with scope.on_cancel(lambda: calls.append(2)):
        scope.cancel()
    assert calls == [2]


def test_on_cancel_refuses_to_begin_when_already_cancelled():
    scope = CancelScope()
    scope.cancel()
    with pytest.raises(ProgramCancelledError), scope.on_cancel(lambda: None):
        raise AssertionError
