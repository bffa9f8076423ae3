"""Sylvan and its peers on the same random-weight checkpoints, one after the other, in rounds.

    python benchmarks/peers/compare.py                    # all peers, all shapes; hours
    python benchmarks/peers/compare.py --shapes 10M --peers sylvan transformers openvino
    python benchmarks/peers/compare.py --write            # and put the tables into the docs

Environments, converted models and results are kept under `--cache`. A peer that cannot be installed
or takes too long is left out with its reason. Run it on a quiet machine: nothing else may compute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoints import SHAPES, write_checkpoint
from peers import PEERS, Peer

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- peers: written by benchmarks/peers/compare.py -->", "<!-- /peers -->"
COLUMNS = ("bf16", "8 bit", "4 bit")
Rates = Mapping[tuple[str, str, str, str], list[float]]  # shape, peer, column, what -> per round


@dataclass(frozen=True)
class Setting:
    """What the command line said."""

    cache: Path
    threads: int
    limit_s: float
    setup_limit_s: float
    words: tuple[str, ...]  # handed to every worker


class Environment:
    """Python of a peer: an environment of its own that also sees what is installed here."""

    def __init__(self, name: str, peer: Peer, setting: Setting) -> None:
        self._folder, self._peer, self._setting = setting.cache / "envs" / name, peer, setting
        self.python = self._folder / "bin" / "python" if peer.packages else Path(sys.executable)

    def prepare(self) -> None:
        """Install once. Raises `subprocess.SubprocessError` where that fails."""
        done = self._folder / ".done"
        if not self._peer.packages or done.exists():
            return
        _run([sys.executable, "-m", "venv", str(self._folder)], 300)
        site = self._folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        (site / "host.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pinned = f"torch=={_version('torch')}"
        command = [str(self.python), "-m", "pip", "install", "-q", pinned, *self._peer.packages]
        _run(command, self._setting.setup_limit_s, dict(self._peer.environment))
        done.touch()

    def work(self, *words: str, limit_s: float) -> str:
        """What the worker printed."""
        return _run([str(self.python), str(HERE / "worker.py"), *words], limit_s)


def _run(command: Sequence[str], limit_s: float, extra: Mapping[str, str] | None = None) -> str:
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **(extra or {})},
        check=False,
    )
    if found.returncode:
        lines = (found.stderr or found.stdout).strip().splitlines() or ["no output"]
        raise subprocess.SubprocessError(f"exit code {found.returncode}: {lines[-1][:200]}")
    return found.stdout


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


@dataclass(frozen=True)
class Candidate:
    """One peer in one format on one shape, ready to be measured."""

    shape: str
    name: str
    column: str
    environment: Environment
    words: tuple[str, str, str, str]  # peer, format, model, converted model


def candidates(options: argparse.Namespace, setting: Setting) -> Iterator[Candidate]:
    """Install, write and convert what is needed; says what is left out and why."""
    for shape in options.shapes:
        model = setting.cache / "models" / shape
        if not model.exists():
            _say(f"{shape}: writing the checkpoint")
            write_checkpoint(shape, model)
    for name in options.peers:
        peer = PEERS[name]
        environment = Environment(name, peer, setting)
        _say(f"{name}: environment")
        try:
            environment.prepare()
        except (subprocess.SubprocessError, OSError) as why:
            _say(f"{name}: left out, cannot be installed: {why}")
            continue
        for shape in options.shapes:
            for column in options.formats:
                if column in peer.formats:
                    yield from _candidate(shape, name, column, environment, setting)


def _candidate(
    shape: str, name: str, column: str, environment: Environment, setting: Setting
) -> Iterator[Candidate]:
    peer, form = PEERS[name], PEERS[name].formats[column]
    model = setting.cache / "models" / shape
    extra = setting.cache / "converted" / f"{name}-{shape}-{form}"
    words = (name, form, str(model), str(extra))
    try:
        if peer.convert and not extra.exists():
            _say(f"{name} {shape} {column}: converting")
            extra.parent.mkdir(parents=True, exist_ok=True)
            environment.work("convert", *words, limit_s=setting.setup_limit_s)
    except subprocess.SubprocessError as why:
        _say(f"{name} {shape} {column}: left out, cannot be converted: {why}")
        return
    yield Candidate(shape, name, column, environment, words)


def measure(found: Sequence[Candidate], rounds: int, setting: Setting) -> Rates:
    """All candidates in turn, `rounds` times, so that what drifts hits all alike."""
    rates: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for number in range(rounds):
        for candidate in found:
            jobs = ["measure", *(["shared"] if PEERS[candidate.name].shares_prefixes else [])]
            for job in jobs:
                for line in _lines(candidate, job, number, setting):
                    rate = line["per_s"] if "per_s" in line else line["s"]
                    key = (candidate.shape, candidate.name, candidate.column, str(line["what"]))
                    rates[key].append(float(rate))
    return rates


def _lines(
    candidate: Candidate, job: str, number: int, setting: Setting
) -> list[dict[str, float | str]]:
    label = f"{candidate.name} {candidate.shape} {candidate.column} {job}, round {number + 1}"
    words = (job, *candidate.words, "--threads", str(setting.threads), "--round", str(number))
    try:
        text = candidate.environment.work(*words, *setting.words, limit_s=setting.limit_s)
    except subprocess.SubprocessError as why:
        _say(f"{label}: {why}")
        return []
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"what"')]
    _say(f"{label}: {len(found)} results")
    return found


def tables(rates: Rates, shapes: Sequence[str]) -> str:
    """Markdown: one table for each shape and format, medians with the spread of the rounds."""
    parts: list[str] = []
    for shape in shapes:
        for column in COLUMNS:
            mine = {k: v for k, v in rates.items() if (k[0], k[2]) == (shape, column)}
            if not mine:
                continue
            works = list(dict.fromkeys(key[3] for key in mine))
            names = list(dict.fromkeys(key[1] for key in mine))
            lines = [f"### {shape}, {column}", "", f"| work | {' | '.join(names)} |"]
            lines.append("|---|" + "---:|" * len(names))
            for what in works:
                cells = [_cell(mine.get((shape, name, column, what), [])) for name in names]
                lines.append(f"| {what} | {' | '.join(cells)} |")
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(found: Sequence[float]) -> str:
    if not found:
        return "-"
    digits = 0 if statistics.median(found) >= 100 else 2
    middle, low, high = (f"{f(found):,.{digits}f}" for f in (statistics.median, min, max))
    return middle if len(found) == 1 else f"{middle} [{low}-{high}]"


def write_docs(text: str) -> None:
    """Replace the part of the page between the marks."""
    page = DOCS.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", "utf-8")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--formats", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit-s", type=float, default=900.0, help="for one peer in one round")
    parser.add_argument("--setup-limit-s", type=float, default=3600.0)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "sylvan-peers")
    parser.add_argument("--write", action="store_true", help="put the tables into the docs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("worker", nargs="*", help="after --: words for the workers, as --new 8")
    return parser.parse_args()


def main() -> None:
    options = _parsed()
    words = tuple(options.worker)
    setting = Setting(options.cache, options.threads, options.limit_s, options.setup_limit_s, words)
    found = list(candidates(options, setting))
    rates = measure(found, options.rounds, setting)
    head = (
        "Tokens a second (requests a second for the shared prefix, seconds for the start), "
        f"medians of {options.rounds} interleaved rounds and their spread, "
        f"{options.threads} threads, {platform.machine()}."
    )
    text = f"{head}\n\n{tables(rates, options.shapes)}"
    print(text)
    if options.json:
        options.json.write_text(json.dumps([[*key, values] for key, values in rates.items()]))
    if options.write:
        write_docs(text)


if __name__ == "__main__":
    main()
