"""Logs a line when a request arrives and one when it ends, as far as operators enabled it.

Headers are never logged, so keys are not either. Texts of clients and models are logged at levels 2
and 3 only.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from typing import Any, Literal

import msgspec
import orjson

from sylvan.config.tree import ObserveConfig
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.server.observe.traces import Traces
from sylvan.runtime.tokenizer.live import LiveRequest, SampleState
from sylvan.runtime.tokenizer.timeline import began_s, stages
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.clock import monotonic

logger = logging.getLogger(__name__)
log = logging.getLogger("sylvan.requests")

PART_CHARS = 2048
"""Characters of a text that level 2 logs."""
_PART_TOKENS = 1024
_DAYS = 7
_WARN_S = 60.0


@dataclass(slots=True)
class RequestLogSettings:
    """Log settings; `/configure_logging` changes them."""

    on: bool = False
    level: int = 2
    style: Literal["text", "json"] = "text"
    hidden: frozenset[str] = field(default_factory=frozenset[str])


class RequestLog:
    """Logs requests of clients.

    Args:
        settings: What is logged, and where.
        tokenizer: Decodes tokens.
        traces: Traces of the requests.

    Raises:
        ConfigError: A directory is not writable.
    """

    def __init__(self, settings: ObserveConfig, tokenizer: Tokenizer, traces: Traces) -> None:
        self.settings = RequestLogSettings(
            settings.log_requests, settings.log_requests_level, settings.log_requests_format
        )
        self._tokenizer, self._traces = tokenizer, traces
        self._handlers = [_handler(target) for target in settings.log_requests_target]

    def admitted(self, live: LiveRequest) -> None:
        """Log an admitted request."""
        if self.settings.on and not live.internal:
            self._write("receive", live, self._of_request(live))

    def ended(self, live: LiveRequest) -> None:
        """Log a finished request; call this before its trace is dropped."""
        if self.settings.on and not live.internal:
            for sample in live.samples:
                self._write("finish", live, self._of_sample(live, sample))

    def close(self) -> None:
        """Close files."""
        for handler in self._handlers:
            handler.close()

    def _write(self, event: str, live: LiveRequest, facts: dict[str, Any]) -> None:
        context = self._traces.context(live)
        line = {
            "event": event,
            "rid": live.rid,
            "call": live.origin.name,
            "peer": live.origin.peer,
            **({"tenant": live.tenant} if live.tenant else {}),
            **({"trace_id": context.trace_id} if context is not None else {}),
            **facts,
        }
        line = {name: value for name, value in line.items() if name not in self.settings.hidden}
        if self.settings.style == "json":
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            text = orjson.dumps({"time": now, **line}).decode()
        else:
            words = (f"{name}={value!r}" for name, value in line.items() if name != "event")
            text = f"{datetime.now().astimezone():%H:%M:%S} {event} {' '.join(words)}"
        if not self._handlers:
            log.info("%s", text)
            return
        record = logging.LogRecord(log.name, logging.INFO, "", 0, "%s", (text,), None)
        for handler in self._handlers:
            handler.handle(record)

    def _of_request(self, live: LiveRequest) -> dict[str, Any]:
        request, level = live.request, self.settings.level
        facts: dict[str, Any] = {
            "prompt_tokens": len(request.input_ids),
            "samples": len(live.samples),
            "stream": live.interval is not None,
            "priority": request.priority,
            "lora": request.lora,
        }
        if level >= 1 and isinstance(request, GenerateRequest):
            given = msgspec.to_builtins(request.sampling)
            facts["sampling"] = given if level >= 2 else _without_texts(given)
        if level >= 2:
            facts["prompt"] = self._text(request.input_ids.tolist())
        return facts

    def _of_sample(self, live: LiveRequest, sample: SampleState) -> dict[str, Any]:
        usage, finish = sample.usage, sample.finish
        ended = sample.delivered_s or live.closed_s
        facts: dict[str, Any] = {
            "sample": sample.index,
            "finish": finish.type if finish is not None else "abort",
            "status": finish.status if finish is not None else None,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "e2e_s": round(max(0.0, ended - began_s(live)), 6),
            "stages_s": {s.name: round(s.seconds, 6) for s in stages(live, sample)},
        }
        if finish is not None and finish.type == "abort":
            facts["message"] = finish.message
        if self.settings.level >= 2:
            facts["output"] = self._text(sample.output_ids)
        return facts

    def _text(self, ids: Sequence[int]) -> str:
        if self.settings.level >= 3:
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return self._tokenizer.decode(list(ids[:_PART_TOKENS]), skip_special_tokens=False)[
            :PART_CHARS
        ]


class LogFile(TimedRotatingFileHandler):
    """A file per day. Lines that a full disk does not take are lost, and nothing else.

    Args:
        path: The file of today.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, when="midnight", backupCount=_DAYS, delay=True)
        self._lost = 0
        self._torn = False
        self._reported_s = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; the first one after a lost line starts a new line."""
        if self._torn:
            with contextlib.suppress(OSError), Path(self.baseFilename).open("ab") as file:
                if file.tell():
                    file.write(b"\n")
                self._torn = False
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Count a lost line, and report losses now and then."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._lost += 1
        self._torn = True
        with contextlib.suppress(OSError):  # what it holds back would come out with a later line
            self.close()
        now_s = monotonic()
        if now_s - self._reported_s >= _WARN_S:
            self._reported_s = now_s
            reason, path = error.strerror, self.baseFilename
            logger.warning("the request log %s lost %d lines so far: %s", path, self._lost, reason)


def _without_texts(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return only numbers and booleans; schemas and stop strings are the client's texts."""
    return {name: value for name, value in sampling.items() if isinstance(value, int | float)}


def _handler(target: str) -> logging.Handler:
    handler: logging.Handler
    if target == "stdout":
        handler = logging.StreamHandler(sys.stdout)
    else:
        folder = Path(target).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handler = LogFile(folder / "requests.log")
            (folder / "requests.log").touch()
        except OSError as error:
            message = f"observe.log_requests_target: cannot write {target}: {error.strerror}"
            raise ConfigError(message) from error
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
