"""Stages of a request have no gaps, and add up to all of its time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sylvan.protocol.messages import Timing
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.tokenizer.live import LiveRequest, SampleState
from sylvan.runtime.tokenizer.timeline import stages

WHOLE = Timing(received=102.0, started=103.0, first_token=106.0, finished=109.5)


def live(timing, last_s):
    request = GenerateRequest(
        rid="a", input_ids=np.zeros(3, np.int32), output_ids=np.zeros(0, np.int32),
        sampling=SamplingParams(), interval=None,
    )  # fmt: skip
    sample = SampleState(request, timing=timing, last_s=last_s)
    return LiveRequest("a", [sample], None, 101.0, received_s=100.0, closed_s=110.0)


@pytest.mark.parametrize(
    ("timing", "last_s", "expected"),
    [
        (
            WHOLE,
            109.75,
            {
                "tokenize": 1.0,
                "api_server_dispatch": 1.0,
                "prefill_waiting": 1.0,
                "prefill_forward": 3.0,
                "decode_forward": 3.5,
                "detokenize": 0.25,
                "network": 0.25,
            },
        ),
        (None, 0.0, {"tokenize": 1.0, "network": 9.0}),  # left before the scheduler reported it
        (
            Timing(received=102.0, finished=104.0),  # ended while it waited
            104.5,
            {
                "tokenize": 1.0,
                "api_server_dispatch": 1.0,
                "decode_forward": 2.0,
                "detokenize": 0.5,
                "network": 5.5,
            },
        ),
    ],
)
def test_stages_add_up_to_all_of_the_time(timing, last_s, expected):
    request = live(timing, last_s)

    found = stages(request, request.samples[0])

    assert {stage.name: stage.seconds for stage in found} == expected
    assert found[0].start_s == 100.0
    assert found[-1].end_s == 110.0
    assert all(a.end_s == b.start_s for a, b in pairwise(found))
