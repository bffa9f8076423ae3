"""The command `sylvan`: parse, call, print; each command is a module that is imported on use."""

from __future__ import annotations

from sylvan.cli.main import main

__all__ = ["main"]
