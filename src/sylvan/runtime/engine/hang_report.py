"""Report about a hung process: the last steps that it planned."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from sylvan.protocol.steps import StepRecord
from sylvan.utils.clock import monotonic

logger = logging.getLogger(__name__)

REPORTED_STEPS = 200
_LOGGED_STEPS = 5


class HangReport(msgspec.Struct, frozen=True, kw_only=True):
    """A hung process. Times: seconds of the monotonic clock.

    Attributes:
        process: Its name.
        pids: Process IDs of the replica; their stacks are on standard error.
        at: UTC time of detection.
        now_s: The same, by the clock of the steps.
        steps: The last planned steps, oldest first.
    """

    process: str
    pids: Mapping[str, int]
    at: str
    now_s: float
    steps: Sequence[StepRecord]


def report_dir(given: str | None) -> Path:
    """Return the directory of reports and profiles."""
    if given is not None:
        return Path(given).expanduser()
    return Path(tempfile.gettempdir()) / f"sylvan-reports-{os.getuid()}"


def write_report(
    folder: str | None, process: str, pids: Mapping[str, int], steps: Sequence[StepRecord]
) -> Path | None:
    """Write a report to a file, and its last steps to the log; return the path.

    On a full disk, only the file is lost.
    """
    at = datetime.now(UTC)
    report = HangReport(
        process=process, pids=pids, at=at.isoformat(), now_s=monotonic(), steps=steps
    )
    for step in steps[-_LOGGED_STEPS:]:
        logger.error("last steps: %s", msgspec.json.encode(step).decode())
    path = report_dir(folder) / f"hang-{process}-{at:%Y%m%d-%H%M%S-%f}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    except OSError as error:
        logger.warning("the report cannot be written to %s: %s", path, error.strerror)
        return None
    logger.error("the last %d steps are in %s", len(steps), path)
    return path
