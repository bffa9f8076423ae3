"""`python -m sylvan.runtime.engine.child MODULE`: runs `main` of a child process's module.

The module is imported instead of executed directly, with garbage collection off meanwhile.
"""

from __future__ import annotations

import importlib
import sys

from sylvan.utils import garbage


def main() -> int:
    """Import and run; returns the exit code."""
    with garbage.postponed():
        module = importlib.import_module(sys.argv[1])
        garbage.spare()
    return module.main()


if __name__ == "__main__":
    sys.exit(main())
