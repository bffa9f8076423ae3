"""Reads the files of data sets; errors name the file and the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from sylvan.protocol.errors import ConfigError

MAX_BYTES = 4 << 30


def json_lines(name: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each object of a JSONL file, with its location for messages.

    Raises:
        ConfigError: The file is unreadable, or a line is not a JSON object.
    """
    for number, line in enumerate(_text(name).splitlines(), 1):
        where = f"{name}, line {number}"
        if line.strip():
            yield where, _object(_parsed(line, where), where)


def json_list(name: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Like `json_lines`, for a JSON file with a list of objects.

    Raises:
        ConfigError: The file is unreadable, or not a list of objects.
    """
    whole = _parsed(_text(name), name)
    if not isinstance(whole, list):
        raise ConfigError(f"{name}: expected a JSON list")
    for number, item in enumerate(cast("list[object]", whole), 1):
        where = f"{name}, entry {number}"
        yield where, _object(item, where)


def positive(value: object, where: str, field: str, most: int = 1 << 24) -> int:
    """Check for a whole number of at least 1.

    Raises:
        ConfigError: It is not, or it exceeds `most`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{where}: {field} must be a number from 1 to {most}, got {value!r}")
    return value


def _text(name: str) -> str:
    path = Path(name).expanduser()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{name} is larger than {MAX_BYTES >> 30} GiB")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the data set {name}: {error}") from error


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: this is not JSON: {error}") from error


def _object(item: object, where: str) -> dict[str, object]:
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: expected a JSON object")
    return cast("dict[str, object]", item)
