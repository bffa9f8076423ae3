"""Determines the commit of this code."""

from __future__ import annotations

import subprocess
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
WRITTEN = "commit.txt"
"""File of the package in wheels and source distributions; `hatch_build.py` writes it."""


def commit(package: Path = _PACKAGE) -> str | None:
    """Return the short ID of the commit, with `-dirty` if files were changed; None if unknown.

    Args:
        package: Directory of `sylvan`, installed or in a checkout.
    """
    try:
        return (package / WRITTEN).read_text().strip() or None
    except FileNotFoundError:
        return _checked_out(package.parents[1])


def _checked_out(root: Path) -> str | None:
    if not (root / ".git").exists():  # otherwise git would search the directories above
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    command += ["--exclude=*"]  # the ID, not the name of a tag
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None
