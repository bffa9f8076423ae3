from __future__ import annotations

import gc
import weakref

import pytest

from sylvan.utils import garbage


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.unfreeze()
    gc.enable()


def test_cycles_are_looked_for_again_after_a_start():
    with garbage.postponed():
        assert not gc.isenabled()

    assert gc.isenabled()


def test_a_start_that_failed_leaves_no_trace():
    with pytest.raises(RuntimeError), garbage.postponed():
        raise RuntimeError

    assert gc.isenabled()


def test_what_is_spared_is_not_looked_at():
    before = gc.get_freeze_count()
    made = [[] for _ in range(1000)]

    garbage.spare()

    assert gc.get_freeze_count() >= before + len(made)


def test_garbage_of_a_start_is_found_when_it_settles():
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    with garbage.postponed():
        gone = weakref.ref(Cycle())
        assert gone() is not None

    garbage.freeze()

    assert gone() is None
