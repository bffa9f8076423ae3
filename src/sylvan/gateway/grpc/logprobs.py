"""Reads log probabilities from gRPC messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sylvan.gateway.grpc.context import garbage
from sylvan.protocol.messages import TokenLogprobs
from sylvan.rpc import scheduler_pb2 as pb


def read_outputs(message: pb.OutputLogProbs, count: int) -> TokenLogprobs | None:
    """Read the log probabilities of the last `count` output tokens; None if there are none.

    Raises:
        UpstreamError: The fields of the message are inconsistent.
    """
    total = len(message.token_ids)
    if not total or not count:
        return None
    if total < count or len(message.token_logprobs) != total:
        raise garbage("log probabilities that do not fit the tokens")
    last = slice(total - count, total)
    ids, values = _alternatives(message.top_logprobs, total)
    chosen = [row.values for row in message.token_ids_logprobs]
    if chosen and len({len(row) for row in chosen}) != 1:
        raise garbage("log probabilities of chosen tokens that do not fit")
    return TokenLogprobs(
        token_ids=np.array(message.token_ids[last], np.int32),
        logprobs=np.array(message.token_logprobs[last], np.float32),
        top_ids=None if ids is None else ids[last],
        top_logprobs=None if values is None else values[last],
        chosen_logprobs=np.array(chosen[last], np.float32) if chosen else None,
    )


def read_inputs(message: pb.InputLogProbs) -> TokenLogprobs | None:
    """Read the log probabilities of a prompt; None if there are none.

    Raises:
        UpstreamError: The fields of the message are inconsistent.
    """
    total = len(message.token_ids)
    if not total:
        return None
    if len(message.token_logprobs) != total:
        raise garbage("log probabilities that do not fit the prompt")
    values = [e.value if e.HasField("value") else np.nan for e in message.token_logprobs]
    ids, tops = _alternatives(message.top_logprobs, total)
    return TokenLogprobs(
        token_ids=np.array(message.token_ids, np.int32),
        logprobs=np.array(values, np.float32),
        top_ids=ids,
        top_logprobs=tops,
    )


def _alternatives(
    rows: Sequence[pb.TopLogProbs], count: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return IDs and values by position; -1 pads positions with fewer alternatives."""
    if not rows:
        return None, None
    if len(rows) != count or any(len(row.token_ids) != len(row.values) for row in rows):
        raise garbage("alternatives that do not fit the tokens")
    width = max(len(row.values) for row in rows)
    ids = np.full((count, width), -1, np.int32)
    values = np.full((count, width), np.nan, np.float32)
    for position, row in enumerate(rows):
        ids[position, : len(row.token_ids)] = row.token_ids
        values[position, : len(row.values)] = row.values
    return ids, values
