from __future__ import annotations

import numpy as np
import pytest

from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.features.prompt_logprobs.control import PromptLogprobsCapability


def req(*ids: int, outputs=(), start=None) -> Req:
    return Req(
        GenerateRequest(
            rid="a",
            input_ids=np.array(ids, np.int32),
            output_ids=np.array(outputs, np.int32),
            sampling=SamplingParams(sampling_seed=1),
            logprobs=LogprobOptions(start=start),
        )
    )


@pytest.mark.parametrize(
    ("work", "start", "expected"),
    [
        ((0, 5, True), 0, ([0, 1, 2, 3], [11, 12, 13, 14])),
        ((0, 5, True), 2, ([2, 3], [13, 14])),
        ((2, 4, False), 0, ([0, 1], [13, 14])),
        ((0, 2, False), 3, None),
        ((0, 5, True), 4, None),
        ((0, 5, True), None, None),
    ],
)
def test_rows_that_predict_prompt_tokens_are_planned(work, start, expected):
    a = req(10, 11, 12, 13, 14, start=start)
    a.pending = int(work[2])

    planned = PromptLogprobsCapability().plan_work(Batch((Slice(a, *work),)))

    found = [(w.rows.tolist(), w.token_ids.tolist()) for w in planned or ()]
    assert found == ([expected] if expected else [])


def test_rows_count_from_the_first_slice_of_the_step():
    other, a = req(1, 2, 3), req(10, 11, 12, start=0)
    a.pending = other.pending = 1

    (rows,) = PromptLogprobsCapability().plan_work(
        Batch((Slice(other, 0, 3, True), Slice(a, 0, 3, True)))
    )

    assert rows.index == 1
    assert rows.rows.tolist() == [3, 4]


def test_prompt_is_not_computed_for_again_once_outputs_exist():
    a = req(10, 11, 12, outputs=(4,), start=0)
    a.pending = 1

    assert PromptLogprobsCapability().plan_work(Batch((Slice(a, 0, 4, True),))) is None
