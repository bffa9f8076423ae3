"""`python -m sylvan` is the command `sylvan`."""

from __future__ import annotations

import sys

from sylvan.cli import main

if __name__ == "__main__":
    sys.exit(main())
