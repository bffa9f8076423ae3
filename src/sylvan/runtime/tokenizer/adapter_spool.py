"""Files of uploaded adapters, kept while they may be read."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdapterSpool:
    """One directory per uploaded adapter. Its methods block.

    Args:
        kept_at: Directory kept for the next start; None: a temporary one.
    """

    def __init__(self, kept_at: Path | None) -> None:
        self._kept_at = kept_at
        self._root: Path | None = kept_at

    def write(self, config: Mapping[str, Any], weights: bytes) -> Path:
        """Write an adapter's files; return its directory.

        Raises:
            TypeError: The configuration is not JSON.
            OSError: The disk is full.
        """
        text = json.dumps(dict(config))
        if self._kept_at is not None:
            self._kept_at.mkdir(parents=True, exist_ok=True, mode=0o700)
        elif self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="sylvan-lora-"))
        folder = Path(tempfile.mkdtemp(dir=self._root))
        try:
            (folder / CONFIG).write_text(text)
            (folder / WEIGHTS).write_bytes(weights)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def holds(self, path: str) -> bool:
        """Whether a directory belongs to this spool."""
        return self._root is not None and Path(path).parent.resolve() == self._root.resolve()

    def remove(self, path: str) -> None:
        """Delete files that are no longer read."""
        if self.holds(path):
            shutil.rmtree(path, ignore_errors=True)

    def sweep(self, used: Collection[str]) -> None:
        """Delete all files not in use: a killed process may have left some."""
        if self._root is None or not self._root.is_dir():
            return
        names = {Path(path).name for path in used}  # unique, however the name is spelled
        for folder in self._root.iterdir():
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Delete everything, unless the next start needs it."""
        if self._kept_at is None and self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
