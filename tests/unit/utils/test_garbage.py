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


def test_collection_resumes_after_a_start():
    with garbage.gc_paused():
        assert not gc.isenabled()

    assert gc.isenabled()


def test_a_start_that_failed_leaves_no_trace():
    with pytest.raises(RuntimeError), garbage.gc_paused():
        raise RuntimeError

    assert gc.isenabled()


def test_frozen_objects_are_not_collected():
    before = gc.get_freeze_count()
    made = [[] for _ in range(1000)]

    garbage.freeze_existing()

    assert gc.get_freeze_count() >= before + len(made)


def test_freeze_collects_the_garbage_of_a_start():
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    with garbage.gc_paused():
        gone = weakref.ref(Cycle())
        assert gone() is not None

    garbage.freeze()

    assert gone() is None
