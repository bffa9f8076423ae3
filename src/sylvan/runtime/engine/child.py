"""`python -m sylvan.runtime.engine.child MODULE [MORE]`: runs `main` of a child process's module.

The module is imported instead of executed directly, with garbage collection off meanwhile. `MORE`
is imported before it, because `main` may need it.
"""

from __future__ import annotations

import importlib
import sys

from sylvan.utils import garbage


def main() -> int:
    """Import and run; returns the exit code."""
    with garbage.gc_paused():
        *_, module = [importlib.import_module(name) for name in reversed(sys.argv[1:])]
        garbage.freeze_existing()
    return module.main()


if __name__ == "__main__":
    sys.exit(main())
