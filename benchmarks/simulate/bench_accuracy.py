"""Claim: simulations predict load tests that they were not fitted to.

Records a server under one load, and fits a profile to it. The profile predicts the same server
under another rate, with other data, and two servers behind a gateway, which are then measured
without recording. Goal: throughput and the median of TTFT within 10 %, 99th percentiles within 20
%. Each load is measured twice, so that the errors can be compared with the server's own variation.
Targets: a model on this machine's cores, which other programs disturb, or (`--paced`) the same
server with steps that take the time of a device of known speed (`paced/sitecustomize.py`).

    python benchmarks/simulate/bench_accuracy.py [--paced [--only-gateway]] [--model DIR]
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
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

CODE = "import sys; from sylvan.cli import main; sys.exit(main())"
RANDOM = ("--input-tokens", 256, "--output-tokens", 64, "--random-range-ratio", 0.3)
SHARED = (
    "--dataset-name", "shared-prefix", "--gsp-num-groups", 12, "--gsp-prompts-per-group", 20,
    "--gsp-system-prompt-len", 320, "--gsp-question-len", 48, "--gsp-range-ratio", 0.5,
    "--gsp-output-len", 48,
)  # fmt: skip
FIGURES = (
    "request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms",
    "p99_tpot_ms", "median_e2e_latency_ms", "p99_e2e_latency_ms",
)  # fmt: skip


def loads(rate: float, requests: int) -> dict[str, tuple]:
    count = ("--requests", requests)
    return {
        "fitted to": (*count, *RANDOM, "--rate", rate),
        "another rate": (*count, *RANDOM, "--rate", 1.6 * rate, "--seed", 7),
        "other data": (*SHARED, "--rate", 1.4 * rate, "--seed", 9),
    }


def command(*words) -> list[str]:
    return [sys.executable, "-c", CODE, *map(str, words)]


@contextmanager
def gateway(model: Path, env: dict[str, str], count: int, *flags):
    """Start several servers behind one address; yield it, and the address of one of them."""
    with ExitStack() as stack:
        urls = [stack.enter_context(server(model, env, *flags)) for _ in range(count)]
        words = command("route", "--worker-urls", *urls, "--port", 0)
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
        try:
            for line in process.stdout:
                if found := re.search(r"Sylvan routes to .* at (http://\S+)", line):
                    yield found[1], urls[0]
                    return
            raise SystemExit("the gateway did not start")
        finally:
            process.terminate()
            process.stdout.read()
            process.wait(60)


@contextmanager
def server(model: Path, env: dict[str, str], *flags):
    words = command("serve", model, "--until-eof", "--server.port", 0, *flags)
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        for line in process.stdout:
            if found := re.search(r"Sylvan serves \S+ at (http://\S+)", line):
                yield found[1]
                return
        raise SystemExit("the server did not start")
    finally:
        process.stdin.close()
        process.stdout.read()
        process.wait(60)


def measure(url: str, load: tuple, results: Path) -> dict:
    words = ("--url", url, "--output", results, "--output-details")
    subprocess.run(command("bench", "serve", *words, *load), check=True, capture_output=True)
    return json.loads(results.read_text().splitlines()[-1])


def simulated(profile: Path, results: Path, file: Path, seeds: int, *flags) -> dict:
    """Return medians over simulations that differ only in the noise of steps."""
    for seed in range(seeds):
        words = ("--model-profile", profile, "--against", results, "--output", file, *flags)
        command_line = command("simulate", *words, "--sim.seed", seed)
        subprocess.run(command_line, check=True, capture_output=True)
    lines = [json.loads(line) for line in file.read_text().splitlines()[-seeds:]]
    return {name: statistics.median(line[name] for line in lines) for name in FIGURES}


def model_of(args: argparse.Namespace, folder: Path) -> Path:
    if args.model:
        return args.model
    if args.paced:
        from tests.support.random_model import write_random_model

        return write_random_model(folder / "model")
    from benchmarks.peers.checkpoints import write_checkpoint

    write_checkpoint("10M", folder / "model")
    return folder / "model"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--paced", action="store_true")
    parser.add_argument(
        "--only-gateway", action="store_true", help="with --paced: skip the single server"
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    env = dict(os.environ)
    if args.paced:
        paths = [str(Path(__file__).parent / "paced"), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        compare(args, folder, env)
    return 0


def compare(args: argparse.Namespace, folder: Path, env: dict[str, str]) -> None:
    model, profile = model_of(args, folder), folder / "profile.json"
    file = folder / "simulated.jsonl"
    for number, (name, load) in enumerate(loads(args.rate, args.requests).items()):
        if number and args.only_gateway:
            break
        runs = []
        for repeat in range(args.repeats):
            recorded = not (number or repeat)
            flags = ("--record", folder / "flight") if recorded else ()
            results = folder / f"{number}-{repeat}.jsonl"
            with server(model, env, *flags) as url:
                runs.append(measure(url, load, results))
            if recorded:
                fit = ("simulate", "fit", folder / "flight", "--results", results, "-o", profile)
                print(
                    subprocess.run(command(*fit), check=True, capture_output=True).stdout.decode()
                )
        show(name, runs, simulated(profile, folder / f"{number}-0.jsonl", file, args.seeds))
    if args.paced:  # servers that share the cores of this machine would slow each other down
        results = folder / "gateway.jsonl"
        load = (*SHARED, "--rate", 2.8 * args.rate, "--seed", 11)
        with gateway(model, env, 2) as (url, one):
            added_ms = gateway_ms(url, one, args.rate, folder / "way.jsonl")
            run = measure(url, load, results)
        flags = ("--replicas", 2, "--gateway-ms", added_ms)
        show("two servers", [run], simulated(profile, results, file, args.seeds, *flags))
        print(json.dumps({"gateway_ms": round(added_ms, 2)}))
        behind = fitted_behind(args, folder, model, env)
        found = simulated(behind, results, file, args.seeds, "--replicas", 2)
        show("two servers, fitted behind a gateway", [run], found)


def fitted_behind(args: argparse.Namespace, folder: Path, model: Path, env: dict[str, str]) -> Path:
    """Return a profile of one server that was recorded behind a gateway, under the first load."""
    flight, results, profile = (folder / name for name in ("behind", "behind.jsonl", "behind.json"))
    load = loads(args.rate, args.requests)["fitted to"]
    with gateway(model, env, 1, "--record", flight) as (url, _):
        measure(url, load, results)
    fit = ("simulate", "fit", flight, "--results", results, "-o", profile)
    print(subprocess.run(command(*fit), check=True, capture_output=True).stdout.decode())
    return profile


def gateway_ms(url: str, server_url: str, rate: float, results: Path) -> float:
    """Return the TTFT that the gateway adds: medians with and without it, interleaved."""
    load = ("--requests", 16, *RANDOM, "--rate", rate)
    through, past = [], []
    for seed in range(3):
        for way, found in ((url, through), (server_url, past)):
            found.append(measure(way, (*load, "--seed", seed), results)["median_ttft_ms"])
    return max(0.0, statistics.median(through) - statistics.median(past))


def show(name: str, runs: list[dict], found: dict) -> None:
    for figure in FIGURES:
        measured = [run[figure] for run in runs]
        errors = [round(found[figure] / value - 1, 3) for value in measured]
        shown = {"measured": [round(m, 2) for m in measured], "simulated": round(found[figure], 2)}
        print(json.dumps({"load": name, "figure": figure, **shown, "error": errors}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
