"""Host copies of adapters: read from their directories, checked, and kept as kernels want them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.features.lora.work import AdapterFiles, LoraReport
from sylvan.runtime.models.adapters import AdapterTargets, Content, num_bytes
from sylvan.runtime.models.lora import read_adapter

_DIGITS = 16  # of a digest that are part of an id
_FILE_PER_COPY = 4
"""Wider numbers, and tables that come with adapters, but are not kept."""
_FILE_BOUND = f"{_FILE_PER_COPY} times lora.memory"


@dataclass(frozen=True, slots=True)
class HostCopy:
    """An adapter in memory."""

    id: str
    content: Content
    num_bytes: int
    rank: int


class AdapterStore:
    """Reads adapters for one model, and keeps them by id.

    Copies are read by the thread of commands and by one of its own, and used by that of the steps,
    which alone calls `start`, `report` and `drop`.

    Args:
        targets: The layers of the model.
        max_rank: Largest rank of a module.
        most_bytes: Of a copy.
    """

    def __init__(self, targets: AdapterTargets, max_rank: int, most_bytes: int) -> None:
        self._targets, self._max_rank, self._most_bytes = targets, max_rank, most_bytes
        self._lock = threading.Lock()
        self._copies: dict[str, HostCopy] = {}
        self._reading: dict[str, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, "sylvan-lora")  # starts with the first copy

    def read(self, name: str, path: str) -> HostCopy:
        """Read an adapter, and keep it under an id made of `name` and its contents.

        Raises:
            ConfigError: it cannot be served beside this model.
        """
        adapter = read_adapter(Path(path), _FILE_PER_COPY * self._most_bytes, _FILE_BOUND)
        content = self._targets.prepare(adapter, self._max_rank)
        made = f"{name}@{adapter.digest[:_DIGITS]}"
        copy = HostCopy(made, content, num_bytes(content), adapter.max_rank)
        if copy.num_bytes > self._most_bytes:
            raise ConfigError(
                f"the adapter takes {copy.num_bytes:,} bytes; lora.memory is {self._most_bytes:,}"
            )
        with self._lock:
            self._copies[made] = copy
        return copy

    def start(self, adapters: Sequence[AdapterFiles]) -> None:
        """Have copies read again that were dropped, beside the steps."""
        for files in adapters:
            self._reading[files.id] = self._thread.submit(self._again, files)

    def report(self, timeout_s: float = 0.0) -> LoraReport:
        """What has been read since the last report, after waiting for so long at most."""
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
        """Give the memory of copies back; those in slots stay until they leave these.

        One that is still being read here, because another rank was faster, is not kept.
        """
        for name in adapters:
            if (reading := self._reading.pop(name, None)) is not None and not reading.cancel():
                wait((reading,))
            self._forget(name)

    def _forget(self, adapter: str) -> None:
        with self._lock:
            self._copies.pop(adapter, None)

    def __getitem__(self, adapter: str) -> HostCopy:
        """The copy of an adapter; waits for it where another rank was faster to read it.

        Raises:
            ConfigError: it cannot be read.
        """
        if (reading := self._reading.get(adapter)) is not None:
            reading.result()
        with self._lock:
            return self._copies[adapter]

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _again(self, files: AdapterFiles) -> None:
        name = files.id.rpartition("@")[0]
        copy = self.read(name, files.path)
        if copy.id != files.id:
            self._forget(copy.id)
            raise ConfigError(f"the files in {files.path!r} are not those that were loaded")


def _reason(adapter: str, error: BaseException) -> str:
    return f"the adapter {adapter.rpartition('@')[0]!r} cannot be read again: {error}"
