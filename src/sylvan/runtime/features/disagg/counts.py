"""What happened to the KV of prompts, for operators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TransferCounts:
    """Since the start: requests with a room, and what became of their KV."""

    started: int = 0
    done: int = 0
    failed: int = 0
    refused: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
