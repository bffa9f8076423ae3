"""Memory that the early executor hands to the full executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sylvan.kernels.blob import Blob
from sylvan.kernels.memory import Bytes
from sylvan.runtime.core.host import HostArrays
from sylvan.runtime.executor.slots import RequestSlots


@dataclass(frozen=True, slots=True)
class InheritedMemory:
    """Memory that one executor hands to the next, which continues with its contents.

    Attributes:
        pages: KV of the model's only group, (pages, bytes of a page).
        host: Page tables and inputs.
        slots: Sampling parameters of requests, and their newest tokens.
        file: Name of the file of packed weights.
        weights: Contents of that file.
    """

    pages: Bytes
    host: HostArrays
    slots: RequestSlots
    file: Path
    weights: Blob
