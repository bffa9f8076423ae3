"""Which requests with adapters may start beside which."""

from __future__ import annotations

import numpy as np

from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.core.req import Req
from sylvan.runtime.features.lora.control import Lora, LoraLimits
from sylvan.runtime.sched.capability import Verdict


def request(rid: str, lora: str | None) -> Req:
    ids = np.arange(3, dtype=np.int32)
    return Req(
        GenerateRequest(
            rid=rid, input_ids=ids, output_ids=ids[:0], sampling=SamplingParams(), lora=lora
        )
    )


def test_a_request_that_was_retracted_for_another_gives_up_its_slot():
    lora = Lora(LoraLimits(slots=2, copies=8, copy_bytes=8, max_overtakes=8))
    lora.poll()
    a, b, urgent, late = (request(name, name) for name in ("a", "b", "urgent", "late"))
    again = request("b2", "b")
    base = request("base", None)

    assert lora.admit(again, [a, b]) is Verdict.READY
    assert lora.admit(late, [a, b]) is Verdict.WAIT

    # within the same step, as many as before
    assert lora.admit(base, [a, b]) is Verdict.READY
    assert lora.admit(late, [a, base]) is Verdict.READY
    assert lora.admit(again, [a, urgent]) is Verdict.WAIT
