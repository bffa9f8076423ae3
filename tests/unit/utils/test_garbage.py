from __future__ import annotations

import gc

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


def test_what_a_start_made_is_spared():
    before = gc.get_freeze_count()
    with garbage.postponed():
        made = [[] for _ in range(1000)]

    assert gc.get_freeze_count() >= before + len(made)
