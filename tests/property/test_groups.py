"""KV groups: whatever is shared, evicted or passed by a window, every read finds its own KV."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.support.cache_machine import CacheMachine, setups

WINDOWS = st.lists(
    st.tuples(st.sampled_from([1, 2, 5, 8, 17, 40]), st.sampled_from([0.0, 0.3, 1.0])),
    min_size=1,
    max_size=2,
)


class Groups(CacheMachine):
    """Full layers, with or without windows and states beside them."""

    @initialize(setup=setups(states=st.sampled_from([0, 0, 3, 20])))
    def begin(self, setup):
        self.start(setup)


class OnlyWindows(CacheMachine):
    """Models whose layers all have windows."""

    @initialize(
        setup=setups(
            full=st.just(False), windows=WINDOWS, prefix=st.sampled_from(["radix", "none"])
        )
    )
    def begin(self, setup):
        self.start(setup)


TestGroups = Groups.TestCase
TestGroups.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
TestOnlyWindows = OnlyWindows.TestCase
TestOnlyWindows.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
