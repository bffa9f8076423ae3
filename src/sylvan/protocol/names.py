"""Internal names of samples.

A request has one or more samples, and each may be submitted again after a process was lost. Inside
the processes, sample 2 of request `abc` is called `abc.2#7.1`: 7 is the serial number of the
request in its API process, 1 the epoch of its replica. The serial number distinguishes requests
with the same rid, consecutive or of two tenants. The epoch grows whenever a process of the replica
is lost, so outputs under a name of an earlier epoch belong to abandoned work.
"""

from __future__ import annotations


def internal_name(rid: str, sample: int, serial: int, epoch: int) -> str:
    """Name of a sample of a request in an epoch."""
    return f"{rid}.{sample}#{serial}.{epoch}"


def epoch_of(name: str) -> int:
    """Epoch of an internal name; 0 if `name` is not one."""
    digits = name.rpartition("#")[2].partition(".")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def rid_of(name: str) -> str:
    """The client's `rid` in an internal name; `name` itself if it is not one."""
    sample = name.rpartition("#")[0]
    return sample.rpartition(".")[0] if sample else name
