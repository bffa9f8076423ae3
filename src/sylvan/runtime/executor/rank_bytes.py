"""Exchanges bytes of any length between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sylvan.kernels.api import Communicator


def all_gather_bytes(ranks: Communicator, data: bytes) -> Sequence[bytes]:
    """Return the bytes of each rank, in rank order. Collective; sizes are exchanged first.

    Raises:
        RankLostError: Another rank has exited or is late.
    """
    sizes = ranks.all_gather(torch.tensor([len(data)], dtype=torch.int64)).flatten().tolist()
    most = max(sizes)
    if not most:
        return [b""] * len(sizes)
    own = torch.zeros(most, dtype=torch.uint8)
    if data:
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    whole = ranks.all_gather(own).numpy()
    return [row[:size].tobytes() for row, size in zip(whole, sizes, strict=True)]
