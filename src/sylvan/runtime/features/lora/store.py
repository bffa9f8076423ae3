"""Host copies of adapters: read from their directories, checked, and laid out for kernels."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.features.lora.work import AdapterFiles, LoraReport
from sylvan.runtime.models.adapters import AdapterTargets, Content
from sylvan.runtime.models.lora import read_adapter

_DIGITS = 16  # digits of a digest in an ID
_FILE_PER_COPY = 4
"""Size allowance for wider dtypes, and for tensors in the file that are not kept."""
_FILE_BOUND = f"{_FILE_PER_COPY} times lora.memory"


@dataclass(frozen=True, slots=True)
class HostCopy:
    """An adapter in host memory."""

    id: str
    content: Content
    num_bytes: int
    rank: int


class AdapterStore:
    """Reads adapters for one model, and stores them by ID.

    The command thread and a thread of this object read copies; the step thread uses them,
    and alone calls `start`, `report` and `drop`.

    Args:
        targets: Linear layers of the model.
        max_rank: Largest rank of a module.
        max_bytes: Largest size of a copy.
    """

    def __init__(self, targets: AdapterTargets, max_rank: int, max_bytes: int) -> None:
        self._targets, self._max_rank, self._max_bytes = targets, max_rank, max_bytes
        self._lock = threading.Lock()
        self._copies: dict[str, HostCopy] = {}
        self._reading: dict[str, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, "sylvan-lora")  # started with the first copy

    def read(self, name: str, path: str) -> HostCopy:
        """Read an adapter, and store it under an ID derived from `name` and its contents.

        Raises:
            ConfigError: This model cannot serve it.
        """
        adapter = read_adapter(Path(path), _FILE_PER_COPY * self._max_bytes, _FILE_BOUND)
        found = self._targets.prepare(adapter, self._max_rank)
        made = f"{name}@{adapter.digest[:_DIGITS]}"
        copy = HostCopy(made, found.content, found.num_bytes, adapter.max_rank)
        if copy.num_bytes > self._max_bytes:
            raise ConfigError(
                f"the adapter takes {copy.num_bytes:,} bytes; lora.memory is {self._max_bytes:,}"
            )
        with self._lock:
            self._copies[made] = copy
        return copy

    def start(self, adapters: Sequence[AdapterFiles]) -> None:
        """Start reading evicted copies again, concurrently with steps."""
        for files in adapters:
            self._reading[files.id] = self._thread.submit(self._again, files)

    def report(self, timeout_s: float = 0.0) -> LoraReport:
        """Return what was read since the last report, after waiting this long at most."""
        if timeout_s and self._reading:
            wait((next(iter(self._reading.values())),), timeout_s)
        loaded: list[str] = []
        failed: dict[str, str] = {}
        for name, future in tuple(self._reading.items()):
            if not future.done():
                continue
            del self._reading[name]
            if (error := future.exception()) is None:
                loaded.append(name)
            else:
                failed[name] = _reason(name, error)
        return LoraReport(tuple(loaded), failed)

    def drop(self, adapters: Sequence[str]) -> None:
        """Free copies; adapters in slots stay there until they are evicted.

        A copy that is still being read here, because another rank was faster, is discarded.
        """
        for name in adapters:
            if (reading := self._reading.pop(name, None)) is not None and not reading.cancel():
                wait((reading,))
            self._forget(name)

    def _forget(self, adapter: str) -> None:
        with self._lock:
            self._copies.pop(adapter, None)

    def __getitem__(self, adapter: str) -> HostCopy:
        """Return the copy of an adapter; waits if another rank was faster to read it.

        Raises:
            ConfigError: It cannot be read.
        """
        if (reading := self._reading.get(adapter)) is not None:
            reading.result()
        with self._lock:
            return self._copies[adapter]

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _again(self, files: AdapterFiles) -> None:
        name = files.id.rpartition("@")[0]
        copy = self.read(name, files.path)
        if copy.id != files.id:
            self._forget(copy.id)
            raise ConfigError(f"the files in {files.path!r} are not those that were loaded")


def _reason(adapter: str, error: BaseException) -> str:
    return f"the adapter {adapter.rpartition('@')[0]!r} cannot be read again: {error}"
