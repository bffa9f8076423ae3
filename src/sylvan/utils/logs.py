"""Sets up logging of a process, once, at its start."""

from __future__ import annotations

import json
import logging
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from typing import Literal

Format = Literal["text", "json"]
_QUIET = ("httpx", "httpcore", "asyncio", "uvicorn.error", "uvicorn.access")


class JsonFormatter(logging.Formatter):
    """One JSON object per message: time, level, logger, message, and the error if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(level: str, style: Format = "text", folder: str | None = None) -> None:
    """Log messages of at least `level` to stderr; of libraries only warnings and errors.

    Args:
        level: Lowest level that is logged.
        style: Format of a message: a line of text, or a JSON object.
        folder: Directory that also gets the messages, one file per day, kept for a week; None: no
            files.

    Raises:
        OSError: The directory is not writable.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = Path(folder) / "sylvan.log"
        handlers.append(TimedRotatingFileHandler(file, when="midnight", backupCount=7))
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    for handler in handlers:
        handler.setFormatter(JsonFormatter() if style == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class LogLevel:
    """Applies the configured log level only when it changes, so that a level set by hand stays.

    Args:
        level: Level at the start.
    """

    def __init__(self, level: str) -> None:
        self._level = level

    def change(self, level: str) -> None:
        """Apply a newly configured level."""
        if level != self._level:
            logging.getLogger().setLevel(level.upper())
        self._level = level
