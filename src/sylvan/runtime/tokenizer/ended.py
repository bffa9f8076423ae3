"""Summary of a finished request: counts, times and reasons, without text and tokens.

A thousand of them are kept, so the garbage collector leaves them out; they hold no cycles.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sylvan.protocol.messages import Finish, Usage
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.tokenizer.live import LiveRequest, SampleState
from sylvan.runtime.tokenizer.timeline import RequestStage, began_s, stages


class EndedSample(msgspec.Struct, frozen=True, gc=False):
    """A finished sample; see `SampleState`. `finished_s`: when its last token was sampled."""

    index: int
    stages: list[RequestStage]
    usage: Usage
    finish: Finish | None
    first_s: float
    last_s: float
    delivered_s: float
    finished_s: float
    losses: int
    weight_versions: tuple[str, ...]


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A finished request. Times: seconds of the monotonic clock.

    Attributes:
        rid: Request ID.
        tenant: Its tenant.
        kind: `generate` or `embed`.
        call: Name of its call.
        began_s: When its call arrived.
        closed_s: When its reader left or finished.
        streams: Its output was read as it came.
        replica: The replica that it was first sent to.
        adapter: LoRA adapter; None: none.
        prompt_tokens: Length of its prompt.
        max_new_tokens: Limit of its output; None: it is not generated.
        samples: Its samples.
    """

    rid: str
    tenant: str
    kind: Literal["generate", "embed"]
    call: str
    began_s: float
    closed_s: float
    streams: bool
    replica: int
    adapter: str | None
    prompt_tokens: int
    max_new_tokens: int | None
    samples: tuple[EndedSample, ...]


def ended(live: LiveRequest) -> EndedRequest:
    """Return what is kept of a request that was just closed; the same object each time."""
    found = live.ended
    if found is None:
        found = live.ended = _ended(live)
    return found


def _ended(live: LiveRequest) -> EndedRequest:
    request = live.request
    generates = isinstance(request, GenerateRequest)
    return EndedRequest(
        rid=live.rid,
        tenant=live.tenant,
        kind="generate" if generates else "embed",
        call=live.origin.name,
        began_s=began_s(live),
        closed_s=live.closed_s,
        streams=live.interval is not None,
        replica=live.replica,
        adapter=request.lora,
        prompt_tokens=len(request.input_ids) + live.samples[0].encoded_tokens,
        max_new_tokens=request.sampling.max_new_tokens or 0 if generates else None,
        samples=tuple([_sample(live, sample) for sample in live.samples]),
    )


def _sample(live: LiveRequest, sample: SampleState) -> EndedSample:
    return EndedSample(
        sample.index,
        stages(live, sample),
        sample.usage,
        sample.finish,
        sample.first_s,
        sample.last_s,
        sample.delivered_s,
        sample.timing.finished if sample.timing is not None else 0.0,
        sample.losses,
        tuple(sample.weight_versions),
    )
