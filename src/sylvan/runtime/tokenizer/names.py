"""Names of samples inside the processes.

A client's `rid` may have several samples, and each may be replayed after a process was lost. Inside
the engine, sample 2 of `abc` in epoch 1 is `abc.2#1`. The epoch counts the replays of the whole
engine, so all names of an earlier epoch belong to work that nobody waits for.
"""

from __future__ import annotations


def internal_name(rid: str, sample: int, epoch: int) -> str:
    """Name of a sample in an epoch."""
    return f"{rid}.{sample}#{epoch}"


def epoch_of(name: str) -> int:
    """Epoch of a name; 0 if it tells none."""
    digits = name.rpartition("#")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else 0
