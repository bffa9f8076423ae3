"""The command `sylvan`: parse, call, print; each command is a module that is imported on use.

Start at `main`: `COMMANDS` lists the commands, and each module defines `SPEC` and `run`. `serve`
starts a server in this process; with `--dp` or `--pd` `replicated` starts several behind a
gateway.
"""

from __future__ import annotations

from sylvan.cli.main import main

__all__ = ["main"]
