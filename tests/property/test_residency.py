"""Lower tiers that are slow, full or lossy: no page is lost, and every read finds its own KV."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.support.cache_machine import CacheMachine, setups


class Tiers(CacheMachine):
    """One or two tiers below the device."""

    @initialize(
        setup=setups(
            room=st.sampled_from([80, 120]),
            tiers=st.sampled_from([(1000,), (1000, 1000), (70, 200), (60,), (25,)]),
            ahead=st.sampled_from([1000, 1000, 20, 4]),
            min_load=st.sampled_from([1, 1, 8]),
            windows=st.sampled_from([[], [], [(5, 0.5)], [(8, 1.0), (17, 0.3)]]),
            states=st.sampled_from([0, 0, 5]),
        )
    )
    def begin(self, setup):
        self.start(setup)


TestTiers = Tiers.TestCase
TestTiers.settings = settings(
    max_examples=50, stateful_step_count=60, deadline=None, report_multiple_bugs=False
)


@pytest.mark.slow
class TestTiersAtLength(Tiers.TestCase):
    settings = settings(
        max_examples=300, stateful_step_count=60, deadline=None, report_multiple_bugs=False
    )
