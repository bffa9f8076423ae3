"""Compares Sylvan with its peers on the same random-weight checkpoints, in interleaved rounds.

    python benchmarks/peers/compare.py --setup            # install and convert only
    python benchmarks/peers/compare.py --check            # do the converted models answer alike?
    python benchmarks/peers/compare.py                    # all peers, all shapes; hours
    python benchmarks/peers/compare.py --shapes 10M 0.5B --minutes 20 --resume --write
    python benchmarks/peers/compare.py --shapes 0.5B -- --variant avx512    # not the best kernels
    python benchmarks/peers/compare.py --shapes lfm2 mamba2 --peers sylvan llama.cpp --formats bf16

Environments, converted models, results and logs are kept under `--cache`. A peer that cannot be
installed, fails or takes too long is left out with its reason, and the rest continues. `--resume`
continues from the results of a run that ended early. Run it on a quiet machine: nothing else may
compute.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints import SHAPES, write_checkpoint
from environments import CommandFailedError, Environment, end_with_processes
from families import FAMILIES
from peers import PEERS
from results import COLUMNS, Journal, Result, parsed, report, write_docs
from stored_models import FILES


@dataclass(frozen=True)
class Setting:
    """The arguments of the command line."""

    cache: Path
    threads: int
    limit_s: float
    setup_limit_s: float
    deadline: float  # of the clock `time.monotonic`
    words: tuple[str, ...]  # handed to every worker

    @property
    def lasting(self) -> tuple[str, ...]:
        """Return the settings that determine results: only results with equal ones are resumed."""
        return (f"threads {self.threads}", *self.words)


@dataclass(frozen=True)
class Candidate:
    """One peer, in one format and shape, ready to be measured."""

    shape: str
    name: str
    column: str
    environment: Environment
    words: tuple[str, str, str, str]  # peer, format, model, converted model

    @property
    def label(self) -> str:
        return f"{self.name} {self.shape} {self.column}"

    @property
    def jobs(self) -> tuple[str, ...]:
        return ("measure", "shared") if PEERS[self.name].shares_prefixes else ("measure",)


@dataclass
class LeftOut:
    """The reasons for gaps in the tables; each line is also printed at once."""

    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        say(f"left out: {line}")
        self.lines.append(line)


def candidates(options: argparse.Namespace, setting: Setting, out: LeftOut) -> list[Candidate]:
    """Install, write and convert what is needed; neighbours in a table run consecutively."""
    for shape in options.shapes:
        model = setting.cache / "models" / shape
        if not model.exists():
            say(f"{shape}: writing the checkpoint")
            write_checkpoint(shape, model)
    found: list[Candidate] = []
    for name in options.peers:
        environment = Environment(name, PEERS[name], setting.cache, setting.threads)
        say(f"{name}: environment")
        try:
            environment.prepare(setting.setup_limit_s)
        except CommandFailedError as why:
            out.add(f"{name}: cannot be installed: {why}")
            continue
        for shape in options.shapes:
            for column in options.formats:
                if column in PEERS[name].formats:
                    found += _converted(shape, name, column, environment, setting, out)
    order = (options.shapes, options.formats, options.peers)
    return sorted(found, key=lambda c: [o.index(x) for o, x in zip(order, _place(c), strict=True)])


def _place(candidate: Candidate) -> tuple[str, str, str]:
    return candidate.shape, candidate.column, candidate.name


def _converted(
    shape: str, name: str, column: str, environment: Environment, setting: Setting, out: LeftOut
) -> Iterator[Candidate]:
    form = PEERS[name].formats[column]
    model = setting.cache / "models" / shape
    shared = form in FILES
    called = f"{shape}-{FILES[form]}" if shared else f"{name}-{shape}-{form}"
    extra = setting.cache / "converted" / called
    candidate = Candidate(shape, name, column, environment, (name, form, str(model), str(extra)))
    if (shared or PEERS[name].convert) and not extra.exists():
        say(f"{candidate.label}: converting")
        extra.parent.mkdir(parents=True, exist_ok=True)
        part = extra.with_name(f"partial-{extra.name}")
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)
        words = (name, form, str(model), str(part))
        job, maker = ("write", _own(setting)) if shared else ("convert", environment)
        try:
            maker.work(job, *words, limit_s=setting.setup_limit_s)
        except CommandFailedError as why:
            out.add(f"{name}, {shape}, {column}: cannot be converted: {why}")
            return
        part.rename(extra)
    yield candidate


def _own(setting: Setting) -> Environment:
    """Return Sylvan's candidate, which writes files that several peers read."""
    return Environment("sylvan", PEERS["sylvan"], setting.cache, setting.threads)


def measure(
    found: Sequence[Candidate], rounds: int, setting: Setting, journal: Journal, out: LeftOut
) -> None:
    """Measure all candidates in turn, `rounds` times, so that drift affects all alike.

    A candidate that fails is left out of later rounds. A measurement does not start if, by its time
    in an earlier round, it would exceed the deadline.
    """
    todo = [(r, c, j) for r in range(rounds) for c in found for j in c.jobs]
    broken: set[tuple[str, str]] = set()
    skipped, spent = 0, 0.0
    for number, (turn, candidate, job) in enumerate(todo):
        key = (candidate.shape, candidate.name, candidate.column, job, turn)
        if journal.done(key) or (candidate.label, job) in broken:
            continue
        if time.monotonic() + journal.spent_s(key) > setting.deadline:
            skipped += 1
            continue
        result = _measured(candidate, job, turn, setting)
        journal.add(result)
        if result.failed:
            broken.add((candidate.label, job))
        spent += result.spent_s
        told = result.failed or f"{len(result.rates)} results"
        say(
            f"[{number + 1}/{len(todo)}, {spent / 60:.1f} min] round {turn + 1}, "
            f"{candidate.label}, {job}: {told}, {result.spent_s:.0f} s"
        )
    if skipped:
        out.add(f"{skipped} of {len(todo)} turns, for which the time was too short")


def _measured(candidate: Candidate, job: str, turn: int, setting: Setting) -> Result:
    words = (job, *candidate.words, "--threads", str(setting.threads), "--round", str(turn))
    start, failed = time.monotonic(), None
    try:
        text = candidate.environment.work(*words, *setting.words, limit_s=setting.limit_s)
    except CommandFailedError as why:
        failed, text = str(why), why.printed
    said = parsed(text)
    if not failed and not said["rates"]:
        failed = "the worker printed no result"
    return Result(
        candidate.shape,
        candidate.name,
        candidate.column,
        job,
        turn,
        setting.lasting,
        said["rates"],
        time.monotonic() - start,
        said["version"],
        failed,
    )


def check(found: Sequence[Candidate], setting: Setting) -> bool:
    """Send every candidate the same prompts; report how often its first tokens equal the first
    candidate's.

    Random weights leave near ties: formats of few bits agree less often, wrong models never.
    """
    reference: dict[str, list[list[int]]] = {}
    good = True
    for candidate in found:
        words = ("check", *candidate.words, "--threads", str(setting.threads))
        try:
            text = candidate.environment.work(*words, limit_s=setting.limit_s)
        except CommandFailedError as why:
            say(f"{candidate.label}: {why}")
            good = False
            continue
        tokens: list[list[int]] = parsed(text)["tokens"]
        wanted = reference.setdefault(candidate.shape, tokens)
        same = sum(a[0] == b[0] for a, b in zip(tokens, wanted, strict=True))
        good &= same > 0
        counts = sorted({len(row) for row in tokens})
        print(
            f"{candidate.label}: {len(tokens)} answers of {counts} tokens, "
            f"{same} of {len(wanted)} begin as {found[0].name}'s do",
            flush=True,
        )
    return good


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parsed() -> argparse.Namespace:
    about = __doc__.split("\n\n")[0] if __doc__ else None
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, *FAMILIES], default=list(SHAPES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--formats", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds for one measurement")
    parser.add_argument("--setup-limit-s", type=float, default=3600.0)
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="start no measurement after this many minutes"
    )
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "sylvan-peers")
    parser.add_argument("--results", type=Path, help="default: results.jsonl in the cache")
    parser.add_argument("--resume", action="store_true", help="continue with existing results")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--setup", action="store_true", help="install and convert, measure nothing")
    only.add_argument("--check", action="store_true", help="compare answers, measure nothing")
    parser.add_argument("--write", action="store_true", help="put the tables into the docs")
    parser.add_argument("worker", nargs="*", help="after --: words for the workers, as --new 8")
    return parser.parse_args()


def main() -> int:
    options = _parsed()
    end_with_processes()
    setting = Setting(
        options.cache,
        options.threads,
        options.limit_s,
        options.setup_limit_s,
        time.monotonic() + 60 * options.minutes,
        tuple(options.worker),
    )
    out = LeftOut()
    found = candidates(options, setting, out)
    if options.setup:
        return 1 if out.lines else 0
    if options.check:
        return 0 if check(found, setting) and not out.lines else 1
    path = options.results or setting.cache / "results.jsonl"
    journal = Journal(path, setting.lasting, resume=options.resume)
    try:
        measure(found, options.rounds, setting, journal, out)
    except KeyboardInterrupt:
        out.add("what was not yet measured when the run was interrupted")
    text = report(journal.results(options.shapes, options.peers), out.lines, _about(options))
    print(text)
    if options.write:
        write_docs(text)
    return 0


def _about(options: argparse.Namespace) -> str:
    words = f" (`{' '.join(options.worker)}`)" if options.worker else ""
    rounds = f"medians of {options.rounds} interleaved rounds and their spread"
    return (
        "Tokens a second (requests a second for the shared prefix, seconds for the start), "
        f"{'one round' if options.rounds == 1 else rounds}, "
        f"{options.threads} threads, {_processor()}{words}. Requests that share a prefix reach "
        "Sylvan over HTTP and the others in their own process."
    )


def _processor() -> str:
    """Return the processor's name, with the instruction sets that matter for these numbers."""
    name, flags = platform.machine(), ""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        title, _, value = line.partition(":")
        if title.strip() == "model name":
            name = value.strip()
        elif title.strip() == "flags":
            flags = value
            break
    known = [f for f in ("avx2", "avx512_vnni", "avx512_bf16", "amx_bf16") if f in flags.split()]
    return f"{name}{f' ({known[-1]})' if known else ''}"


if __name__ == "__main__":
    sys.exit(main())
