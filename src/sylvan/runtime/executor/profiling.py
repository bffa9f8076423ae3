"""Profiles a running executor: PyTorch, the ops of the step program, and Python (py-spy).

Profilers cost nothing until started. A file that cannot be written fails only the command.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch import profiler
from torch._C._profiler import _ExperimentalConfig

from sylvan.kernels.native.cost import OpCost
from sylvan.protocol.commands import StartProfile, StopProfile
from sylvan.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_ACTIVITIES = {
    "CPU": profiler.ProfilerActivity.CPU,
    "GPU": profiler.ProfilerActivity.CUDA,
    "CUDA": profiler.ProfilerActivity.CUDA,
    "XPU": profiler.ProfilerActivity.XPU,
}
_PY_SPY_S = 20.0
_PY_SPY_RATE = 100


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Measured times of the ops of a step program.

    Attributes:
        steps: Number of measured steps.
        costs: Cost of each op, in execution order.
        nanoseconds: Time of each op, summed over all steps.
        bytes_per_s: The machine's memory bandwidth; None if not measured.
    """

    steps: int
    costs: Sequence[OpCost]
    nanoseconds: Sequence[int]
    bytes_per_s: float | None


class MeasuredProgram(Protocol):
    """A step program whose ops can be measured during serving."""

    def measure(self, *, on: bool) -> MeasuredSteps:
        """Start or stop measuring; return the measurements so far."""
        ...


class OpTime(msgspec.Struct, frozen=True, kw_only=True):
    """One op of the step program.

    `floor_share` is the time to read its weights at the machine's memory bandwidth, as a share of
    the measured time: 1 is optimal.
    """

    op: str
    rows: str
    us_per_step: float
    weight_bytes: int
    row_bytes: int
    floor_us: float
    floor_share: float


class Profiling:
    """Records at most one profile at a time.

    Attributes:
        program: The step program; None if there is none.
    """

    def __init__(self) -> None:
        self.program: MeasuredProgram | None = None
        self._torch: profiler.profile | None = None
        self._asked: StartProfile | None = None
        self._spy: subprocess.Popen[bytes] | None = None

    def start(self, command: StartProfile) -> dict[str, Any]:
        """Start a profile.

        Raises:
            ConfigError: a profile is being recorded already, or an activity is not available.
        """
        if self._asked is not None:
            raise ConfigError("a profile is being recorded; stop it first")
        wanted = {_activity(name) for name in command.activities} & profiler.supported_activities()
        folder = Path(command.folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"output_dir: cannot write {folder}: {error.strerror}") from error
        if wanted:
            self._torch = profiler.profile(
                activities=sorted(wanted, key=str),
                with_stack=command.with_stack,
                record_shapes=command.record_shapes,
                # steps may run in another thread than commands
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self._torch.start()
        if self.program is not None:
            self.program.measure(on=True)
        self._spy = _spy_on_us(folder / f"{_own_name(command)}-python.speedscope.json")
        self._asked = command
        return {"folder": str(folder)}

    def stop(self, command: StopProfile) -> dict[str, Any]:
        """Stop the profile and write its files.

        Raises:
            ConfigError: no profile is being recorded, or its files cannot be written.
        """
        asked, self._asked = self._asked, None
        if asked is None:
            raise ConfigError("no profile is being recorded")
        files: list[str] = []
        errors: list[str] = []
        for write in (self._write_torch, self._write_ops, self._write_python):
            try:
                path = write(Path(asked.folder), _own_name(asked))
            except (OSError, RuntimeError) as error:
                errors.append(str(error))
                continue
            if path is not None:
                files.append(str(path))
        if errors:
            raise ConfigError(f"the profile could not be written whole: {'; '.join(errors)}")
        return {"files": files}

    def close(self) -> None:
        """Discard a running profile without writing files."""
        if self._spy is not None:
            self._spy.kill()
            self._spy.wait()
            self._spy = None

    def _write_torch(self, folder: Path, name: str) -> Path | None:
        recorded, self._torch = self._torch, None
        if recorded is None:
            return None
        recorded.stop()
        path = folder / f"{name}-torch.trace.json"
        try:
            recorded.export_chrome_trace(str(path))  # does not report a full disk
            msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        except (OSError, RuntimeError, msgspec.DecodeError) as error:
            path.unlink(missing_ok=True)  # a truncated file is useless
            raise OSError(f"{path}: {error}; is the disk full?") from error
        return path

    def _write_ops(self, folder: Path, name: str) -> Path | None:
        if self.program is None:
            return None
        measured = self.program.measure(on=False)
        path = folder / f"{name}-ops.json"
        body = {"steps": measured.steps, "bytes_per_s": measured.bytes_per_s}
        content = {**body, "ops": op_times(measured)}
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path

    def _write_python(self, folder: Path, name: str) -> Path | None:
        spy, self._spy = self._spy, None
        if spy is None:
            return None
        path = folder / f"{name}-python.speedscope.json"
        spy.send_signal(signal.SIGINT)  # py-spy writes its file on SIGINT
        try:
            spy.wait(_PY_SPY_S)
        except subprocess.TimeoutExpired:
            spy.kill()
            spy.wait()
        if not path.exists():  # py-spy lacks permission to read this process
            logger.warning("py-spy recorded nothing (exit code %s)", spy.returncode)
            return None
        return path


def op_times(measured: MeasuredSteps) -> list[OpTime]:
    """Time per step of each op, and the share that its memory traffic explains."""
    found: list[OpTime] = []
    for cost, ns in zip(measured.costs, measured.nanoseconds, strict=True):
        us = ns / 1e3 / max(1, measured.steps)
        floor = cost.floor_us(measured.bytes_per_s) if measured.bytes_per_s else 0.0
        found.append(
            OpTime(
                op=cost.name,
                rows=cost.rows,
                us_per_step=round(us, 3),
                weight_bytes=cost.weight_bytes,
                row_bytes=cost.row_bytes,
                floor_us=round(floor, 3),
                floor_share=round(floor / us, 4) if us else 0.0,
            )
        )
    return found


def _own_name(command: StartProfile) -> str:
    """File name that is unique per rank and replica, because all write to the same folder."""
    return f"{command.name}-{os.getpid()}"


def _activity(name: str) -> profiler.ProfilerActivity:
    found = _ACTIVITIES.get(name.upper())
    if found is None:
        known = ", ".join(_ACTIVITIES)
        raise ConfigError(f"activities: {name!r} cannot be recorded; there are {known}")
    return found


def _spy_on_us(path: Path) -> subprocess.Popen[bytes] | None:
    program = shutil.which("py-spy")
    if program is None:
        return None
    words = [program, "record", "--pid", str(os.getpid()), "--output", str(path)]
    return subprocess.Popen(
        [*words, "--format", "speedscope", "--rate", str(_PY_SPY_RATE), "--nonblocking"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
