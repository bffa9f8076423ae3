"""Joins and cuts runs of log probabilities, without tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sylvan.protocol.messages import TokenLogprobs

_OPTIONAL = ("top_ids", "top_logprobs", "chosen_logprobs")


def join(parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
    """Join at least one run of consecutive positions."""

    def rows(name: str) -> np.ndarray | None:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    return TokenLogprobs(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_ids=rows("top_ids"),
        top_logprobs=rows("top_logprobs"),
        chosen_logprobs=rows("chosen_logprobs"),
    )


def cut(logprobs: TokenLogprobs, start: int, stop: int) -> TokenLogprobs:
    """Positions [start, stop) of a run."""
    rows = {name: getattr(logprobs, name) for name in _OPTIONAL}
    return TokenLogprobs(
        token_ids=logprobs.token_ids[start:stop],
        logprobs=logprobs.logprobs[start:stop],
        **{name: None if row is None else row[start:stop] for name, row in rows.items()},
    )
