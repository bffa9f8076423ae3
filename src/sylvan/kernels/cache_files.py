"""A bounded cache directory, shared by processes; its files can be regenerated. Loads no torch."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sylvan.config.load_cache import PROGRAM, WEIGHTS
from sylvan.kernels.blob import is_unfinished, write_blob
from sylvan.kernels.memory import Bytes

_SPARE_SHARE, _MIN_SPARE, _MAX_SPARE = 0.05, 1 << 30, 4 << 30  # of the disk, that stay free


@dataclass(frozen=True, slots=True)
class CacheFiles:
    """The files in one directory; the least recently used are deleted to make room.

    Attributes:
        folder: The directory, which may not exist yet.
        share: Share of the disk that all files together may take.
    """

    folder: Path
    share: float = 1.0

    def write(
        self,
        name: str,
        about: Mapping[str, Any],
        arrays: Sequence[Bytes],
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """Write a file as `write_blob` does, after making room for it.

        Raises:
            OSError: The file cannot be written, or there is too little room.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_room(name, sum(array.nbytes for array in arrays))
        write_blob(self.folder / name, about, arrays, ended)

    def used(self, name: str) -> None:
        """Record that a file was used now; does nothing in a read-only directory."""
        with contextlib.suppress(OSError):
            (self.folder / name).touch()

    def _make_room(self, name: str, size: int) -> None:
        for file in filter(is_unfinished, self.folder.iterdir()):
            file.unlink(missing_ok=True)
        files = [f for f in self.folder.iterdir() if f.suffix in (PROGRAM, WEIGHTS)]
        found = sorted((_use(file) for file in files), reverse=True)  # newest first
        held = sum(num_bytes for _, num_bytes, _ in found)
        disk = shutil.disk_usage(self.folder)
        spare = min(max(int(_SPARE_SHARE * disk.total), _MIN_SPARE), _MAX_SPARE)
        left = min(int(self.share * disk.total), held + disk.free - spare) - size
        if left < 0:
            room = max(0, left + size)
            raise OSError(f"it takes {size:,} bytes; the cache has room for {room:,}")
        for _, num_bytes, file in found:
            left -= num_bytes if file.name != name else 0
            if left < 0 and file.name != name:
                file.unlink(missing_ok=True)


def _use(file: Path) -> tuple[int, int, Path]:
    """When a file was used last, and its size in bytes."""
    try:
        found = file.stat()
    except FileNotFoundError:  # another process deleted it
        return 0, 0, file
    return found.st_mtime_ns, found.st_size, file
