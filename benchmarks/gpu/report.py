"""Collects measurements, prints them as a table, and ends the run within its time limit."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from sylvan.protocol.errors import SylvanError

_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, AttributeError)
_MISSING = (ImportError, FileNotFoundError)
_WARM = 3
_CAPTURED = 4  # calls in a graph


@dataclass(frozen=True)
class Row:
    section: str
    what: str
    value: float
    unit: str
    share: float | None = None  # of the floor, if there is one
    floor: float | None = None  # in `unit`
    note: str = ""

    def line(self) -> str:
        share = "" if self.share is None else f"{100 * self.share:.0f} %"
        floor = "" if self.floor is None else f"{self.floor:.4g}"
        shown = f"{self.value:.4g} {self.unit}"
        return f"{self.section:10} {self.what:50} {shown:>18} {floor:>10} {share:>7}  {self.note}"


@dataclass
class Report:
    device: str
    deadline_s: float
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, section: str, what: str, value: float, unit: str, **more) -> None:
        row = Row(section, what, value, unit, **more)
        self.rows.append(row)
        print(row.line(), flush=True)

    def left(self) -> float:
        return self.deadline_s - time.monotonic()

    def skip(self, name: str, why: str) -> None:
        self.skipped.append(f"{name}: {why}")
        print(f"skipped {self.skipped[-1]}", flush=True)

    def fits(self, name: str, needs_s: float) -> bool:
        """Whether there is time for a part of this length; print a note if not."""
        left = self.left()
        if left < needs_s:
            self.skip(name, f"needs {needs_s:.0f} s, {max(left, 0):.0f} s left")
        return left >= needs_s

    @contextmanager
    def part(self, name: str, needs_s: float) -> Iterator[bool]:
        """Run one part; yield False if there is no time. A failure does not end the run."""
        if not self.fits(name, needs_s):
            yield False
            return
        try:
            yield True
        except (SylvanError, *_MISSING) as error:  # what this machine cannot do, in a sentence
            self.skip(name, str(error).splitlines()[0])
        except torch.OutOfMemoryError as error:
            self.skip(name, f"too little memory: {str(error).splitlines()[0]}")
        except _FAILURES as error:
            first = (str(error).splitlines() or [""])[0]
            self.failed.append(f"{name}: {type(error).__name__}: {first[:200]}")
            print(f"FAILED {self.failed[-1]}\n{traceback.format_exc()}", flush=True)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    def table(self) -> str:
        head = f"{'section':10} {'what':50} {'value':>18} {'floor':>10} {'share':>7}"
        lines = [head, "-" * len(head), *(row.line() for row in self.rows)]
        lines += [f"skipped: {name}" for name in self.skipped]
        lines += [f"FAILED: {text}" for text in self.failed]
        return "\n".join(lines)


class Timer:
    """Measures seconds per call on a device: many calls between two synchronisations.

    On a GPU the calls are captured in a graph, as decode steps are, so that the measured time is
    the device's and not Python's; `launched` measures both.
    """

    def __init__(self, device: torch.device, *, quick: bool) -> None:
        self._device = device
        self._min_s = 0.005 if quick else 0.1

    def sync(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def __call__(self, call: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            return self.launched(call)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(_WARM):
                call()
        self.sync()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_CAPTURED):
                call()
        return self.launched(graph.replay) / _CAPTURED

    def launched(self, call: Callable[[], object]) -> float:
        """Return the seconds per call as Python launches it, one after the other."""
        for _ in range(_WARM):
            call()
        self.sync()
        count = 1
        while True:
            start = time.perf_counter()
            for _ in range(count):
                call()
            self.sync()
            spent = time.perf_counter() - start
            if spent > self._min_s or count > 10_000:
                return spent / count
            count *= 4
