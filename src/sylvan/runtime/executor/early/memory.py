"""State that steps pass to later steps, in any executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sylvan.kernels.blob import Blob
from sylvan.kernels.memory import Bytes
from sylvan.runtime.core.host import HostArrays
from sylvan.runtime.executor.slots import RequestSlots


@dataclass(frozen=True, slots=True)
class InheritedMemory:
    """Owned by one executor after another: the next one continues where the last one ended.

    Attributes:
        pages: KV of the model's only group, (pages, bytes of a page).
        host: Page tables and inputs.
        slots: Sampling parameters of requests, and their newest tokens.
        file: Of the packed weights.
        weights: Its contents.
    """

    pages: Bytes
    host: HostArrays
    slots: RequestSlots
    file: Path
    weights: Blob
