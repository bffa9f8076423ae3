"""Claim: `sylvan bench serve` agrees with other published load test tools within 5 %.

Runs SGLang's `bench_serving` and NVIDIA's `aiperf` unchanged, alternating with ours, under the same
load against one server. The server's steps take the time of a device of known speed
(`../simulate/paced`), so that the tools, which share the cores of this machine with it, affect it
little. Each tool prints its whole table into `--keep`. Reported is the ratio of ours to theirs:
medians of the runs of each.

    python -m venv build/aiperf && build/aiperf/bin/pip install aiperf==0.13.0
    python tests/sdk/run.py sglang     # installs SGLang's package in build/sdk/sglang
    python benchmarks/server/bench_load_tools.py --aiperf build/aiperf/bin/aiperf \\
        --sglang build/sdk/sglang
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

CODE = "import sys; from sylvan.cli import main; sys.exit(main())"
PACED = Path(__file__).parents[1] / "simulate" / "paced"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16}
PROMPT, OUTPUT, TOOL_S = 128, 48, 300
# All that SGLang's tool takes of its server's half, whose imports have no wheels for CPUs.
SGLANG = """
import sys, types
half = types.ModuleType("sglang.srt.disaggregation.utils")
half.FAKE_BOOTSTRAP_HOST = "2.2.2.2"
sys.modules[half.__name__] = half
from sglang.benchmark.serving import cli_main
cli_main()
"""


@dataclass(frozen=True)
class Bench:
    """Settings common to every tool."""

    url: str
    model: Path
    requests: int
    concurrency: int
    folder: Path
    seed: int = 0

    def run(self, name: str, command: list[str], **environ: str) -> None:
        """Run a tool, and store its output."""
        with (self.folder / f"{name}-{self.seed}.out").open("w") as printed:
            subprocess.run(
                command,
                stdout=printed,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=TOOL_S,
                env={**os.environ, **environ},
            )


Figures = dict[str, float]


def ours(bench: Bench, api: str) -> Figures:
    """`sylvan bench serve`."""
    file = bench.folder / f"ours-{api}-{bench.seed}.jsonl"
    command = [sys.executable, "-c", CODE, "bench", "serve", "--url", bench.url, "--api", api]
    command += [
        "--model",
        "m",
        "--tokenizer",
        str(bench.model),
        *sizes(bench),
        "--output",
        str(file),
    ]
    command += ["--concurrency", str(bench.concurrency)]
    bench.run(f"ours-{api}", command)
    return of_sglang(file)


def sglang(bench: Bench, folder: Path) -> Figures:
    """Run SGLang's `bench_serving`, with prompts as token IDs like ours."""
    file = bench.folder / f"sglang-{bench.seed}.jsonl"
    command = [sys.executable, "-c", SGLANG, "--backend", "sglang", "--base-url", bench.url]
    command += ["--model", "m", "--tokenizer", str(bench.model), *sizes(bench), "--tokenize-prompt"]
    command += ["--max-concurrency", str(bench.concurrency), "--output-file", str(file)]
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    bench.run("sglang", command, PYTHONPATH=path, HF_HUB_OFFLINE="1")
    return of_sglang(file)


def sizes(bench: Bench) -> list[str]:
    return [
        *("--dataset-name", "random-ids", "--random-range-ratio", "1"),
        *("--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT)),
        *("--num-prompts", str(bench.requests), "--seed", str(bench.seed), "--flush-cache"),
    ]


def of_sglang(file: Path) -> Figures:
    found = json.loads(file.read_text().splitlines()[-1])
    assert found["completed"], found
    return {
        "requests_s": found["request_throughput"],
        "ttft_ms": found["median_ttft_ms"],
        "tpot_ms": found["median_tpot_ms"],
        "e2e_ms": found["median_e2e_latency_ms"],
    }


def aiperf(bench: Bench, program: Path) -> Figures:
    """Run NVIDIA's `aiperf`; its inter-token latency is what others call TPOT."""
    folder = bench.folder / f"aiperf-{bench.seed}"
    command = [str(program), "profile", "-m", "m", "-u", bench.url, "--streaming"]
    command += ["--endpoint-type", "completions", "--tokenizer", str(bench.model)]
    command += ["--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(OUTPUT)]
    command += ["--synthetic-input-tokens-stddev", "0", "--output-tokens-stddev", "0"]
    command += ["--extra-inputs", "ignore_eos:true", "--concurrency", str(bench.concurrency)]
    command += ["--request-count", str(bench.requests), "--random-seed", str(bench.seed + 1)]
    command += ["--use-server-token-count", "--ui", "none", "--artifact-dir", str(folder)]
    bench.run("aiperf", command)
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    return {
        "requests_s": found["request_throughput"]["avg"],
        "ttft_ms": found["time_to_first_token"]["p50"],
        "tpot_ms": found["inter_token_latency"]["p50"],
        "e2e_ms": found["request_latency"]["p50"],
    }


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, Path]]:
    """Start a paced server of a small model with the built-in tokenizer; yield its address and
    directory.
    """
    model = folder / "model"
    model.mkdir()
    source = Path(str(files("sylvan") / "assets" / "sapling"))
    for file in source.glob("*.json"):
        shutil.copy(file, model / file.name)
    config = json.loads((source / "config.json").read_text()) | SMALL
    (model / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", CODE, "serve", str(model), "--load-format", "dummy"]
    command += ["--served-model-name", "m", "--until-eof", "--server.port", "0"]
    path = os.pathsep.join(filter(None, (str(PACED), os.environ.get("PYTHONPATH", ""))))
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"Sylvan serves \S+ at (http://\S+)", line):
                yield found[1], model
                return
        raise SystemExit("the server did not start")
    finally:
        process.stdin.close()
        process.stdout.read()
        process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--aiperf", type=Path, help="the program")
    parser.add_argument("--sglang", type=Path, help="folder with SGLang's package")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder for the output of the tools")
    args = parser.parse_args()
    tools: dict[str, tuple[str, Callable[[Bench], Figures]]] = {}
    if args.sglang:
        tools["sglang"] = "native", lambda bench: sglang(bench, args.sglang.absolute())
    if args.aiperf:
        tools["aiperf"] = "completions", lambda bench: aiperf(bench, args.aiperf.absolute())
    if not tools:
        parser.error("give --aiperf or --sglang")
    with tempfile.TemporaryDirectory() as temporary, served(Path(temporary)) as (url, model):
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, (api, tool) in tools.items():
            runs: list[tuple[Figures, Figures]] = []
            for seed in range(args.runs):
                bench = Bench(url, model, args.requests, args.concurrency, folder, seed)
                theirs_first = seed % 2
                first = tool(bench) if theirs_first else ours(bench, api)
                second = ours(bench, api) if theirs_first else tool(bench)
                runs.append((second, first) if theirs_first else (first, second))
            for figure in runs[0][0]:
                own, others = ([run[side][figure] for run in runs] for side in (0, 1))
                row = {
                    "tool": name,
                    "figure": figure,
                    "ours": [round(value, 2) for value in own],
                    "theirs": [round(value, 2) for value in others],
                    "ratio": round(statistics.median(own) / statistics.median(others), 3),
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
