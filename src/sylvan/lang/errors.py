"""Errors of programs.

* SylvanError
  - ProgramError       a node of a program failed; names the program's line
    - ProgramCancelledError `cancel()` was called
    - ProgramTimeoutError   the program's deadline passed
  - BackendError       a backend refused or broke a call
  - MissingExtraError       a provider's SDK is not installed
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from types import CodeType

from sylvan.protocol.errors import SylvanError


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a program."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        """Format like a traceback entry, with the source line if its file is readable."""
        place = f"{self.code.co_filename}:{self.line}, in {self.code.co_name}"
        source = linecache.getline(self.code.co_filename, self.line).strip()
        return f"{place}: {source}" if source else place


class ProgramError(SylvanError, RuntimeError):
    """A node of a program failed; `__cause__` is the exception of the backend or node.

    Args:
        message: What failed.
        where: The line of the program that appended the node, if known.
    """

    def __init__(self, message: str, where: SourceLine | None = None) -> None:
        super().__init__(message if where is None else f"{where}\n    {message}")
        self.where = where


class ProgramCancelledError(ProgramError):
    """The program, or one that it was forked from, was cancelled."""


class ProgramTimeoutError(ProgramError, TimeoutError):
    """The program's deadline passed."""


class BackendError(SylvanError, RuntimeError):
    """A model service refused or interrupted a call.

    Args:
        message: The service's message.
        status: HTTP status, if there was an answer.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class MissingExtraError(SylvanError, ImportError):
    """A provider needs a package that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package {package!r}; install it with: pip install 'sylvan[{extra}]'"
        )
