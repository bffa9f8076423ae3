"""`meta_info` of chat choices, as `/generate` has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sylvan.api.native_reply import ReplyOptions, ReplyState, timing_keys
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.server.context import Context
from sylvan.runtime.serving.samples import Sample


def meta_info(
    context: Context,
    sample: Sample,
    logprobs: LogprobOptions | None,
    *,
    reasoning_tokens: int,
    began_s: float,
) -> dict[str, Any]:
    """What is known of a finished sample.

    Args:
        context: The server's parts.
        sample: The sample.
        logprobs: What log probabilities were asked for.
        reasoning_tokens: How many of its tokens were thinking.
        began_s: When its call came, by the context's clock.
    """
    options = ReplyOptions(
        logprobs=logprobs is not None,
        top=logprobs is not None and logprobs.top > 0,
        text_of=context.engine.tokenizer.token_text,
        weight_version=context.engine.router.weight_version,
    )
    state = ReplyState(options, reasoning_tokens=reasoning_tokens)
    state.weight_versions = sample.weight_versions
    for part in sample.logprobs:
        state.add("", (), part, None)
    elapsed_s, tokens = context.clock() - began_s, sample.usage.completion_tokens
    timing = timing_keys(sample.timing, elapsed_s, context.wall(), tokens)
    return state.reply(sample.rid, sample.usage, sample.finish, timing)["meta_info"]


def weight_metadata(context: Context, versions: Sequence[str]) -> dict[str, Any]:
    """`metadata` of an answer that weights with these labels made, in order."""
    metadata: dict[str, Any] = {
        "weight_version": [context.engine.router.weight_version, *versions][-1]
    }
    return metadata | ({"weight_versions": list(versions)} if len(versions) > 1 else {})
