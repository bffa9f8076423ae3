"""Claim: the kernels of each instruction set run near its own peak.

Measures all instruction sets that this machine supports.

    python benchmarks/kernels/bench_variants.py [--format bf16 w8a8 w4a8] [--shape M] [--out FILE]

Runs `bench_step.py` once for each variant and format, in separate processes: decoding against the
memory bandwidth for weights, prompts against the rate of that variant's own linear layer
(`share_own`; PyTorch's rate would be that of another instruction set). The best variant is the
default, the others are forced. The table names the processor. Takes minutes; run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from sylvan.kernels.native.library import usable
from sylvan.utils.machine import inspect_machine

STEP = Path(__file__).with_name("bench_step.py")
_LIMIT_S = 1800


def table(runs: list[dict]) -> list[str]:
    """Format a row for each run: shares of the limit, for prompts by the variant's own rate."""
    lines = [
        "| variant | weights | decode 1, 8, 32 | prompts of 512, 2,048 |",
        "|---|---|---:|---:|",
    ]
    for run in runs:
        decode = ", ".join(f"{run[f'decode {n}']['share']:.2f}" for n in (1, 8, 32))
        prompt = ", ".join(f"{run[f'prefill {n}']['share_own']:.2f}" for n in (512, 2048))
        lines.append(f"| {run['variant']} | {run['options']['format']} | {decode} | {prompt} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", nargs="+", default=["bf16", "w8a8", "w4a8"])
    parser.add_argument("--shape", default="M")
    parser.add_argument("--variant", nargs="+", help="default: all that run on this machine")
    parser.add_argument("--out", type=Path)
    parser.add_argument("more", nargs="*", help="after --: flags of bench_step.py")
    options = parser.parse_args()
    obstacles = usable()
    chosen = options.variant or [name for name, why in obstacles.items() if not why]
    print(f"{inspect_machine().cpu_name}; not here: ", end="")
    print(", ".join(f"{name} ({why})" for name, why in obstacles.items() if why) or "nothing")
    found, failed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for variant in chosen:
            for weights in options.format:
                out = Path(folder) / f"{variant}-{weights}.json"
                command = [sys.executable, str(STEP), options.shape, "--format", weights]
                command += ["--variant", variant, "--json", str(out), *options.more]
                done = subprocess.run(command, check=False, timeout=_LIMIT_S)
                failed += done.returncode != 0
                if done.returncode == 0:
                    found.append(json.loads(out.read_text()))
    for line in table(found):
        print(line)
    if options.out:
        options.out.write_text(json.dumps({"cpu": inspect_machine().cpu_name, "runs": found}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
