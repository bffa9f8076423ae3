"""Where packed weights and programs are kept for later starts."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from sylvan.config.env import cache_dir
from sylvan.config.tree import Config

PROGRAM, WEIGHTS = ".program", ".weights"
"""Suffixes of files with step programs and packed weights."""
_ROOT = 0
_NAME = 40
_DEFAULT_SHARE = 0.25


def default_directory() -> Path | None:
    """The directory that `load_cache: auto` takes.

    None if it can be neither read nor made, or belongs to another user, whose programs are not
    run; root's may.
    """
    try:
        folder = cache_dir() / "load"
        if folder.is_dir():
            mine = folder.stat().st_uid in (_ROOT, os.geteuid())
            return folder if mine and os.access(folder, os.R_OK | os.X_OK) else None
        there = next(parent for parent in folder.parents if parent.exists())
    except (OSError, RuntimeError):  # a directory that is closed to us, a user without a home
        return None
    return folder if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else None


def load_cache_dir(config: Config) -> Path | None:
    """The directory of a resolved configuration; None: nothing is kept."""
    if config.load_cache in (None, "auto"):
        return None
    return Path(config.load_cache).expanduser()


def load_cache_share(config: Config) -> float:
    """Share of the disk that the files of a resolved configuration may take."""
    return _DEFAULT_SHARE if load_cache_dir(config) == default_directory() else 1.0


def file_name(model_dir: Path, digest: str, suffix: str) -> str:
    """The name of a file.

    Args:
        model_dir: The model that it was made from.
        digest: Of all that its contents depend on.
        suffix: Says what it contains.
    """
    return f"{model_dir.name[:_NAME]}-{digest}{suffix}"


def may_hold_program(config: Config) -> bool:
    """Whether an earlier start may have left a program for a configuration.

    Judges by the model's name, without reading a file.

    Args:
            config: As it was given: `auto` is not resolved.
    """
    auto = config.load_cache == "auto"
    folder = default_directory() if auto else load_cache_dir(config)
    name = glob.escape(Path(config.model).name[:_NAME])
    return folder is not None and any(folder.glob(f"{name}-*{PROGRAM}"))
