"""Reads JSON files from untrusted sources, such as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """Return the value in a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not JSON, is nested too deep, or contains text that is not valid Unicode.
    """
    text = path.read_text("utf-8")
    try:
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeEncodeError:
        raise ValueError("it contains an unpaired surrogate") from None
    return value
