"""Which saved program a configuration may use."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from sylvan import __version__
from sylvan.config import Config
from sylvan.config.checkpoint import model_dir
from sylvan.config.load import dump
from sylvan.kernels.native.library import ops_digest

SUFFIX = ".program"
_FORMAT = 1
"""Increment when the contents of files change."""
_OF_NO_PROGRAM = (
    *("server", "limits", "text", "observe", "grammar", "embedding", "media", "chaos"),
    *("served_model_name", "weight_version", "tokenizer", "load_cache", "seed", "processes"),
)
"""Settings that no program depends on."""


def program_path(config: Config, variant: str) -> Path:
    """The file of the program, which may not exist.

    Args:
        config: Resolved, with `load_cache`.
        variant: Of the kernels.
    """
    assert config.load_cache is not None
    folder = model_dir(config.model)
    said = {
        "versions": (_FORMAT, __version__, version("torch")),
        "kernels": (variant, ops_digest()),
        "files": checkpoint_files(folder),
        "config": _relevant(dump(config)),
    }
    name = xxhash.xxh3_128_hexdigest(msgspec.json.encode(said))
    return Path(config.load_cache) / f"{folder.name[:40]}-{name}{SUFFIX}"


def checkpoint_files(model_dir: Path) -> list[tuple[str, int, int, int]]:
    """Name, size and times of all files of a checkpoint."""
    paths = [model_dir] if model_dir.is_file() else sorted(model_dir.iterdir())
    found = [(path.name, path.stat()) for path in paths if path.is_file()]
    return [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found]


def _relevant(config: dict[str, Any]) -> dict[str, Any]:
    """Without what may differ: also the number of pages, for which a program is not compiled."""
    found = {name: value for name, value in config.items() if name not in _OF_NO_PROGRAM}
    sizes = ("memory", "max_tokens", "max_states", "prefix", "eviction")
    found["cache"] = {k: v for k, v in found["cache"].items() if k not in sizes}
    steps = ("max_batch_tokens", "max_running_reqs")
    found["scheduler"] = {name: found["scheduler"][name] for name in steps}
    return found
