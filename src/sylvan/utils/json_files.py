"""JSON files of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The value in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, nested deeper than any file that means well, or holds text that
            is not Unicode.
    """
    text = path.read_text("utf-8")
    try:
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except UnicodeEncodeError:
        raise ValueError("a text in it has half of a surrogate pair") from None
    return value
