"""Stores results in a file as they arrive, and formats them as tables."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs" / "performance-details.md"
BEGIN, END = "<!-- peers: written by benchmarks/peers/compare.py -->", "<!-- /peers -->"
COLUMNS = ("bf16", "8 bit", "4 bit", "Q4_K_M", "Q4_0", "GPTQ", "AWQ", "GPTQ, head in 8 bits")
Rates = Mapping[tuple[str, str, str, str], list[float]]  # shape, peer, column, what -> per round


@dataclass(frozen=True)
class Result:
    """One job of one peer in one round: its rates by name, and why it ended early, if it did."""

    shape: str
    peer: str
    column: str
    job: str
    round: int
    settings: tuple[str, ...]  # everything that the numbers depend on and the keys do not tell
    rates: Mapping[str, float] = field(default_factory=dict)
    spent_s: float = 0.0
    version: str = ""
    failed: str | None = None

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return (self.shape, self.peer, self.column, self.job, self.round)


class Journal:
    """Results as JSON lines; each is on disk before the next job starts."""

    def __init__(self, path: Path, settings: tuple[str, ...], *, resume: bool) -> None:
        self._path, self._settings = path, settings
        self._results: dict[tuple[str, str, str, str, int], Result] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not resume:
            path.replace(path.with_name(path.name + ".before"))
        if path.exists():
            for line in path.read_text("utf-8").splitlines():
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            raw = json.loads(line)
            found = Result(**raw | {"settings": tuple(raw["settings"])})
        except (ValueError, TypeError, KeyError):
            return  # a line that an interrupted run left half written
        if found.settings == self._settings:
            self._results[found.key] = found

    def add(self, result: Result) -> None:
        self._results[result.key] = result
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def done(self, key: tuple[str, str, str, str, int]) -> bool:
        """Whether this was measured completely; another run retries failures."""
        return key in self._results and self._results[key].failed is None

    def spent_s(self, key: tuple[str, str, str, str, int]) -> float:
        """Return the duration of the job in another round; 0 if it has not run."""
        same = [r.spent_s for r in self._results.values() if r.key[:4] == key[:4]]
        return max(same, default=0.0)

    def results(self, shapes: Sequence[str], peers: Sequence[str]) -> list[Result]:
        """Return the results of the named shapes and peers, in the order of the names."""
        found = [r for r in self._results.values() if r.shape in shapes and r.peer in peers]
        return sorted(found, key=lambda r: (shapes.index(r.shape), peers.index(r.peer), r.round))


def rates(results: Iterable[Result]) -> Rates:
    found: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for result in results:
        for what, rate in result.rates.items():
            found[result.shape, result.peer, result.column, what].append(rate)
    return found


def report(results: Sequence[Result], left_out: Sequence[str], about: str) -> str:
    """Format as Markdown: what ran, a table per shape and format, what is missing and why."""
    versions = sorted({r.version for r in results if r.version})
    parts = [f"{about} Versions: {', '.join(versions)}." if versions else about]
    parts += tables(rates(results))
    missing = [*left_out, *(_told(r) for r in results if r.failed)]
    if missing:
        parts.append("\n".join(["Left out:", "", *(f"- {line}" for line in missing)]))
    return "\n\n".join(parts)


def _told(result: Result) -> str:
    label = f"{result.peer}, {result.shape}, {result.column}, {result.job}"
    return f"{label}, round {result.round + 1}: {result.failed}"


def tables(measured: Rates) -> list[str]:
    """Return one table per shape and format: medians, with the spread of several rounds."""
    parts: list[str] = []
    for shape in dict.fromkeys(key[0] for key in measured):
        for column in COLUMNS:
            mine = {k: v for k, v in measured.items() if (k[0], k[2]) == (shape, column)}
            if not mine:
                continue
            names = list(dict.fromkeys(key[1] for key in mine))
            lines = [f"### {shape}, {column}", "", f"| work | {' | '.join(names)} |"]
            lines.append("|---|" + "---:|" * len(names))
            for what in dict.fromkeys(key[3] for key in mine):
                cells = [_cell(mine.get((shape, name, column, what), [])) for name in names]
                lines.append(f"| {what} | {' | '.join(cells)} |")
            parts.append("\n".join(lines))
    return parts


def _cell(found: Sequence[float]) -> str:
    if not found:
        return "-"
    digits = 0 if statistics.median(found) >= 100 else 2
    middle, low, high = (f"{f(found):,.{digits}f}" for f in (statistics.median, min, max))
    return middle if len(found) == 1 else f"{middle} [{low}-{high}]"


def write_docs(text: str, page: Path = DOCS) -> None:
    """Replace the part of the page between the markers. Raises `ValueError` if there are none."""
    before, begin, rest = page.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the marks {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", "utf-8")


def parsed(text: str) -> dict[str, Any]:
    """The worker's lines: `version`, `rates` by name, `tokens` of a check."""
    found: dict[str, Any] = {"version": "", "rates": {}, "tokens": []}
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # peers talk too, and an ended worker leaves half a line
        if not isinstance(said, dict):
            continue
        if "what" in said and "value" in said:
            found["rates"][said["what"]] = float(said["value"])
        found |= {name: said[name] for name in ("version", "tokens") if name in said}
    return found
