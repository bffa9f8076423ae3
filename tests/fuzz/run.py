"""Fuzz for a while: `python -m tests.fuzz.run --seconds 600 [TARGET ...]`, or `make fuzz`.

Each target runs in a process of its own with bounds on memory and on the time of an input, so that
a crash is a finding like any other. Mutations are blind here; `tests.fuzz.lead` leads them by the
code they reach. Findings are stored in `tests/fuzz/corpus/TARGET`, which the test suite replays.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing as mp
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from tests.fuzz.shapes import mutate
from tests.fuzz.targets import MAX_S, TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
MEMORY_BYTES = 4 << 30
MAX_POOL = 2000
_STALL_S = 60.0  # without an answer of the process: it hangs where no signal reaches it


class SlowInputError(Exception):
    """An input took too long."""


def corpus_of(target: Target) -> list[Path]:
    """Inputs that found something once."""
    return sorted((CORPUS / target.name).glob("*"))


def save(target: Target, data: bytes) -> Path:
    """Keep an input for good."""
    file = CORPUS / target.name / hashlib.sha256(data).hexdigest()[:16]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def try_bounded(target: Target, data: bytes) -> str | None:
    """Run one input; return the fault, if any."""
    signal.signal(signal.SIGVTALRM, _too_slow)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_S)
    try:
        target.try_(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({place.filename}:{place.lineno})"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


def _too_slow(*_: object) -> None:
    raise SlowInputError(f"took more than {MAX_S:g} s")


def inputs(target: Target, seed: int) -> Iterator[bytes]:
    """Endless inputs: seeds and the corpus, then mutations of them."""
    random = Random(seed)
    pool = [*target.seeds(), *(file.read_bytes() for file in corpus_of(target))]
    yield from pool
    while True:
        data = mutate(random.choice(pool), random, pool)
        yield data
        if len(data) < 20_000 and random.random() < 0.02:
            if len(pool) >= MAX_POOL:
                pool.pop(random.randrange(len(pool)))
            pool.append(data)


def _work(name: str, seed: int, pipe: Connection) -> None:
    """A process: tells each input before it runs, and each finding."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    target = TARGETS[name]
    for data in inputs(target, seed):
        pipe.send(data)
        pipe.send(try_bounded(target, data))


def fuzz(target: Target, seconds: float, seed: int) -> tuple[int, dict[str, bytes]]:
    """Number of inputs tried, and the first input of each kind of finding."""
    context = mp.get_context("spawn")
    found: dict[str, bytes] = {}
    count, spent_s = 0, 0.0
    while spent_s < seconds:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(target.name, seed + count, theirs))
        process.start()
        theirs.close()
        data = b""
        ours.poll(_STALL_S)  # importing takes seconds, which do not count
        began_s = time.monotonic()
        try:
            while spent_s + time.monotonic() - began_s < seconds:
                if not ours.poll(_STALL_S):
                    found.setdefault("hangs", data)
                    break
                data = ours.recv()
                problem = ours.recv() if ours.poll(_STALL_S) else "hangs"
                count += 1
                if problem is not None:
                    found.setdefault(problem.rpartition("(")[2], data)
                    print(f"{target.name}: {problem}\n  {data[:200]!r}", flush=True)
                if problem == "hangs":
                    break
        except EOFError:
            process.join(_STALL_S)
            print(f"{target.name}: the process ended: {process.exitcode}\n  {data[:200]!r}")
            found.setdefault(f"exit {process.exitcode}", data)
        finally:
            spent_s += time.monotonic() - began_s
            process.kill()
            process.join()
            ours.close()
    return count, found


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], help="default: all")
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together")
    parser.add_argument("--seed", type=int, default=time.monotonic_ns() % 2**32)
    args = parser.parse_args()
    names = args.targets or list(TARGETS)
    total = 0
    for name in names:
        count, found = fuzz(TARGETS[name], args.seconds / len(names), args.seed)
        print(f"{name}: {count} inputs, {len(found)} findings", flush=True)
        for data in found.values():
            print(f"  kept as {save(TARGETS[name], data)}")
        total += len(found)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
