"""Finds the saved program that a configuration may use."""

from __future__ import annotations

import functools
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from sylvan import __version__
from sylvan.config import Config
from sylvan.config.checkpoint import model_dir
from sylvan.config.load import dump
from sylvan.config.load_cache import PROGRAM, file_name, load_cache_dir, load_cache_share
from sylvan.kernels.cache_files import CacheFiles
from sylvan.kernels.native.library import ops_digest

_FORMAT = 1
"""Format number of saved programs; increment it when their contents change."""
_DECIDING = "kernels", "checkpoints", "runtime/executor", "runtime/layers", "runtime/models"
_OF_NO_PROGRAM = (
    *("server", "limits", "text", "observe", "grammar", "embedding", "media", "chaos"),
    *("served_model_name", "weight_version", "tokenizer", "load_cache", "seed", "processes"),
)
"""Settings that do not affect a program."""


def program_name(config: Config, variant: str) -> str:
    """Return the file name of the program, which may not exist.

    Args:
        config: The resolved configuration.
        variant: Variant of the kernels.
    """
    folder = model_dir(config.model)
    said = {
        "versions": (_FORMAT, __version__, version("torch"), code_digest()),
        "kernels": (variant, ops_digest()),
        "files": checkpoint_files(folder),
        "config": _relevant(dump(config)),
    }
    return file_name(folder, xxhash.xxh3_128_hexdigest(msgspec.json.encode(said)), PROGRAM)


def load_cache_files(config: Config) -> CacheFiles | None:
    """Return the load cache of a resolved configuration; None if it has none."""
    folder = load_cache_dir(config)
    return None if folder is None else CacheFiles(folder, load_cache_share(config))


@functools.cache
def code_digest() -> str:
    """Return the digest of sizes and times of the source files that affect packing and compiling.

    The version number covers releases; this covers edited sources and installs from a repository.
    """
    root = Path(__file__).parents[3]
    found: list[tuple[str, int, int]] = []
    for folder in _DECIDING:
        for path, folders, names in os.walk(root / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            ours = [name for name in names if name.endswith((".py", ".so"))]
            stats = [(name, os.stat(f"{path}/{name}")) for name in ours]
            found += [(f"{path}/{name}", s.st_size, s.st_mtime_ns) for name, s in stats]
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(sorted(found)))


def checkpoint_files(model_dir: Path) -> list[tuple[str, int, int, int]]:
    """Return name, size and times of all files of a checkpoint and of its subdirectories."""
    paths = [model_dir]
    if model_dir.is_dir():
        paths = [path for path in sorted(model_dir.iterdir()) if not path.name.startswith(".")]
        paths += [inner for path in paths if path.is_dir() for inner in sorted(_inside(path))]
    found = [(str(path.relative_to(model_dir)), path.stat()) for path in paths if path.is_file()]
    return [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found]


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # unreadable, so no weights are read from it
        return []


def _relevant(config: dict[str, Any]) -> dict[str, Any]:
    """Drop the settings that do not affect a program, including the number of pages."""
    found = {name: value for name, value in config.items() if name not in _OF_NO_PROGRAM}
    sizes = ("memory", "max_tokens", "max_states", "prefix", "eviction")
    found["cache"] = {k: v for k, v in found["cache"].items() if k not in sizes}
    steps = ("max_batch_tokens", "max_running_reqs")
    found["scheduler"] = {name: found["scheduler"][name] for name in steps}
    return found
