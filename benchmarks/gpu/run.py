"""Claim: on a GPU the engine runs close to the limits of its memory and matrix units.

One command without network: measures the limits, each kernel's speed as a share of its limit and
its error, models of real shapes with random weights through the scheduler, the gains by graphs,
overlap and the radix cache, equality of greedy tokens with transformers, and the speed of
transformers' continuous batching. Parts for which no time is left are skipped and named.

    python benchmarks/gpu/run.py [--minutes 9] [--out gpu.json]
    python benchmarks/gpu/run.py --only quantised   # a part, or its tiles: --only tiles
    python benchmarks/gpu/run.py --device cpu --tiny      # test this program
"""

from __future__ import annotations

import argparse
import importlib
import platform as host
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attention
import engine
import kernels
import quantised
import start
import torch
from report import Report, Timer
from shapes import REAL, TINY, TINY_SERVED

from sylvan.runtime.platform.find import load_kinds, open_platform

ALONE = {
    "kernels": kernels.measure,
    "attention": attention.measure,
    "quantised": quantised.measure,
    "tiles": quantised.tiles,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="cuda, rocm, cpu; auto: the first GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test this program")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", choices=sorted(ALONE), help="one part, in about a minute")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    options = parser.parse_args()
    kinds = load_kinds()
    name = options.device
    if name == "auto":
        usable = (n for n, k in kinds.items() if k.facts.automatic and k.problem() is None)
        name = next(usable, "")
        if not name:
            print(f"there is no GPU: {kinds['cuda'].problem()}", file=sys.stderr)
            return 2
    deadline = time.monotonic() + 60 * options.minutes
    device = open_platform(kinds[name])
    report = Report(f"{_device_name(name)}, torch {torch.__version__}", deadline)
    print(report.device, flush=True)
    bench = kernels.Bench(device, report, Timer(device.device, quick=options.tiny), options.tiny)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        if options.only:
            ALONE[options.only](bench, kernels.ceilings(bench))
        else:
            _run(bench, Path(folder))
    report.write(options.out)
    print(f"\n{report.table()}\n\n{options.out} has the same as JSON")
    return 1 if report.failed else 0


def _run(bench: kernels.Bench, folder: Path) -> None:
    shapes = TINY if bench.tiny else REAL
    report = bench.report
    top = kernels.ceilings(bench)
    kernels.measure(bench, top)
    attention.measure(bench, top)
    quantised.measure(bench, top)
    served = TINY_SERVED if bench.tiny else shapes[0]
    # Measurements with a goal come first, in case time runs out.
    for name, needs, part in (
        ("check: transformers", 20, lambda: _peers().same_tokens(bench, folder)),
        ("check: no waiting", 20, lambda: engine.no_waiting(bench, folder, shapes[0])),
        ("engine", 30, lambda: engine.measure(bench, top, folder, reversed(shapes[:2]))),
        ("ablations", 60, lambda: engine.ablations(bench, folder, shapes[0])),
        ("start", 60, lambda: start.cold_and_warm(bench, folder, served)),
        ("peer", 40, lambda: _peers().continuous_batching(bench, folder, shapes[0])),
        ("engine: others", 60, lambda: engine.measure(bench, top, folder, shapes[2:])),
    ):
        with report.part(name, bench.needs(needs)) as go:
            if go:
                part()
    engine.memory_note(bench)


def _peers() -> Any:
    """Run the comparison with transformers, which only this part needs."""
    return importlib.import_module("peers")


def _device_name(kind: str) -> str:
    if kind in ("cuda", "rocm"):
        return torch.cuda.get_device_name()
    return f"{kind}, {host.machine()}"


if __name__ == "__main__":
    sys.exit(main())
