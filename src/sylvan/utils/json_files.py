"""JSON files of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The value in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or nested deeper than any file that means well.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
