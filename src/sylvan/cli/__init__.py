"""The command `sylvan`: parse, call, print; every command is one module, imported when used."""

from __future__ import annotations

from sylvan.cli.main import main

__all__ = ["main"]
