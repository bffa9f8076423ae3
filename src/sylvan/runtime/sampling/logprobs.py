"""Log probabilities of chosen and likely tokens. Shapes: P positions, V vocabulary."""

from __future__ import annotations

import numpy as np
import torch

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import TokenLogprobs
from sylvan.protocol.requests import LogprobOptions


def token_logprobs(
    logits_PV: torch.Tensor, token_ids: IntArray, options: LogprobOptions
) -> TokenLogprobs:
    """Log probabilities of `token_ids` (P,), of the most likely ids, and of requested ids.

    Args:
        logits_PV: float32, divided by the temperature if the log probabilities are to include it.
        token_ids: The token of each position.
        options: Requested ids; the server has rejected those beyond the vocabulary, and here they
            are clamped.
    """
    logprobs_PV = torch.log_softmax(logits_PV, -1)
    ids = torch.from_numpy(token_ids.astype(np.int64)).to(logits_PV.device)
    own = logprobs_PV.gather(-1, ids[:, None])[:, 0]
    top_ids = top = chosen = None
    if options.top:
        values, where = _largest(logprobs_PV, min(options.top, logits_PV.shape[1]))
        top_ids, top = where.cpu().numpy().astype(np.int32), values.cpu().numpy()
    if options.token_ids:
        wanted = torch.tensor(options.token_ids, device=logits_PV.device)
        chosen = logprobs_PV[:, wanted.clamp(0, logits_PV.shape[1] - 1)].cpu().numpy()
    return TokenLogprobs(
        token_ids=token_ids,
        logprobs=own.cpu().numpy(),
        top_ids=top_ids,
        top_logprobs=top,
        chosen_logprobs=chosen,
    )


def _largest(x_PV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest values and their ids; ties by ascending id."""
    values, ids = x_PV.topk(count, -1)
    by_id = ids.argsort(-1)
    values, order = torch.sort(values.gather(-1, by_id), dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_id).gather(-1, order)
