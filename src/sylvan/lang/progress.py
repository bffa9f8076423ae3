"""A progress bar for batches of programs."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO


class ProgressBar:
    """Counts to `total` on one line of a terminal; safe to update from many threads."""

    def __init__(self, total: int, file: TextIO | None = None) -> None:
        self._total = total
        self._file = file or sys.stderr
        self._done = 0
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._show()

    def update(self) -> None:
        """Count one finished program."""
        with self._lock:
            self._done += 1
            self._show()

    def close(self) -> None:
        """End the line."""
        self._file.write("\n")
        self._file.flush()

    def _show(self) -> None:
        rate = self._done / max(time.monotonic() - self._started, 1e-9)
        filled = 30 * self._done // max(self._total, 1)
        bar = "#" * filled + "." * (30 - filled)
        self._file.write(f"\r[{bar}] {self._done}/{self._total} programs, {rate:.1f}/s")
        self._file.flush()
