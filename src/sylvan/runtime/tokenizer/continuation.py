"""Continues samples that another server started."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.tokenizer.checks import check_ids
from sylvan.runtime.tokenizer.live import SampleState
from sylvan.runtime.tokenizer.types import SampleDelta


def take_over(samples: Sequence[SampleState], past: Sequence[SampleDelta], vocab_size: int) -> None:
    """Restore new samples to the state in `past`.

    Raises:
        RequestError: These deltas do not belong to these samples.
    """
    for delta in past:
        if not 0 <= delta.index < len(samples):
            raise _invalid(f"there is no sample {delta.index}")
        sample = samples[delta.index]
        if sample.finish is not None:
            raise _invalid(f"sample {delta.index} continues after its end")
        check_ids(delta.token_ids, vocab_size, "past")
        sample.output_ids.extend(delta.token_ids)
        sample.usage = delta.usage
        sample.weight_versions = list(delta.weight_versions)
        sample.finish, sample.timing = delta.finish, delta.timing
        sample.finish_delivered = delta.finish is not None
        sample.first_delivered = True
        sample.losses = sample.suspicions = 1
        if delta.prompt_logprobs is not None:
            sample.has_prompt_logprobs = True
    for sample in samples:
        request = sample.request
        assert isinstance(request, GenerateRequest), "only generation is continued"
        limit = request.sampling.max_new_tokens or 0
        if len(sample.output_ids) >= limit and sample.first_delivered and sample.finish is None:
            raise _invalid(f"{len(sample.output_ids)} of {limit} tokens without an end")


def _invalid(why: str) -> RequestError:
    return RequestError(f"The past output is not of this request: {why}.", param="past")
