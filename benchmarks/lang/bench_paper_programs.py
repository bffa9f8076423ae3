"""Claim: shared prefixes make the programs of the paper faster, and cost nothing where there are
none.

Runs each program of `programs.py` on two servers, with the radix cache on and off, and as plain
OpenAI calls to the first. Runs are interleaved and paired; the cache is emptied before each, and
every run has prompts of its own. Reports programs per second, and the ratio to each other form with
a 95% confidence interval (bootstrap over the pairs).

    python benchmarks/lang/bench_paper_programs.py --model MODEL [--programs 32] [--repeats 5]

The servers are started one after the other on free ports; both stay up, one idle while the other
works. `--model 0.5B` stands for random weights of that shape (24 layers of 896, 14 heads, 2 key
heads; the built-in model's vocabulary, so 0.36 billion parameters). Pass further flags of `sylvan
serve` as `--serve load_format=dummy --serve threads=2`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from programs import Workload, workloads

import sylvan as sgl
from sylvan.lang.backends._http import HttpClient

SAPLING = Path(__file__).parents[2] / "src/sylvan/assets/sapling"
HALF_BILLION = json.loads((Path(__file__).parents[1] / "half_billion.json").read_text())
OWN = ("vocab_size", "max_position_embeddings", "tie_word_embeddings")  # sapling's are kept
SHAPE = {name: size for name, size in HALF_BILLION.items() if name not in OWN} | {"head_dim": 64}
FORMS = ("shared", "cache off", "fork off", "plain calls")


class Uncommitted(sgl.RuntimeEndpoint):
    """A backend that forks and batches without telling the server which prefix will be shared."""

    def commit_lazy_operations(self, s):
        """Do nothing."""

    def cache_prefix(self, prefix_str):
        """Do nothing."""


def run_program(workload: Workload, backend, threads: int) -> float:
    start = time.perf_counter()
    states = workload.program.run_batch(
        workload.items, backend=backend, num_threads=threads, temperature=0
    )
    seconds = time.perf_counter() - start
    for state in states:
        state.text()  # raises if the program failed
    return len(states) / seconds


def run_plain(workload: Workload, url: str, threads: int) -> float:
    client = HttpClient(url)

    def ask(prompt: str, tokens: int) -> str:
        body = {"model": "default", "prompt": prompt, "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        return client.call("POST", "/v1/completions", body)["choices"][0]["text"]

    start = time.perf_counter()
    with ThreadPoolExecutor(min(threads, len(workload.items))) as pool:
        list(pool.map(lambda item: workload.plain(ask, item), workload.items))
    seconds = time.perf_counter() - start
    client.close()
    return len(workload.items) / seconds


def interval(ratios: list[float], draws: int = 2000) -> list[float]:
    """95% confidence interval of the median ratio."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(draws))
    return [round(medians[int(draws * q)], 3) for q in (0.025, 0.975)]


def measure(args, on: sgl.Runtime, off: sgl.Runtime) -> dict:
    rates: dict[str, dict[str, list[float]]] = {}
    uncommitted = Uncommitted(on.url)
    for run in range(args.repeats + 1):
        for i, workload in enumerate(workloads(args.programs, run)):
            if args.only and workload.name not in args.only:
                continue
            forms = {
                "shared": lambda w=workload: run_program(w, on, args.threads),
                "cache off": lambda w=workload: run_program(w, off, args.threads),
                "fork off": lambda w=workload: run_program(w, uncommitted, args.threads),
                "plain calls": lambda w=workload: run_plain(w, on.url, args.threads),
            }
            began = time.perf_counter()
            order = FORMS[(run + i) % 4 :] + FORMS[: (run + i) % 4]
            for form in order:
                on.endpoint.flush_cache()
                rate = forms[form]()
                if run:  # the first round warms up
                    rates.setdefault(workload.name, {}).setdefault(form, []).append(rate)
            print(f"run {run}: {workload.name} {time.perf_counter() - began:.0f} s", flush=True)
            if run == args.repeats:
                print(json.dumps({workload.name: summary(rates[workload.name])}), flush=True)
    return {name: summary(found) for name, found in rates.items()}


def summary(rates: dict[str, list[float]]) -> dict:
    found: dict = {form: round(statistics.median(values), 3) for form, values in rates.items()}
    for form in FORMS[1:]:
        ratios = [a / b for a, b in zip(rates["shared"], rates[form], strict=True)]
        found[f"shared / {form}"] = {
            "median": round(statistics.median(ratios), 3), "interval": interval(ratios),
        }  # fmt: skip
    return found


def half_billion(folder: Path) -> None:
    """Write the built-in model's directory with another shape and without weights."""
    for file in SAPLING.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    config = json.loads((SAPLING / "config.json").read_text()) | SHAPE
    (folder / "config.json").write_text(json.dumps(config))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory, or 0.5B; default: the built-in")
    parser.add_argument("--programs", type=int, default=32, help="programs of each kind per run")
    parser.add_argument("--threads", type=int, default=32, help="concurrent programs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", action="append", help="names of workloads")
    parser.add_argument("--serve", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = dict(pair.split("=", 1) for pair in args.serve)
    with contextlib.ExitStack() as stack:
        path = args.model
        if path == "0.5B":
            path = stack.enter_context(tempfile.TemporaryDirectory())
            half_billion(Path(path))
            options["load_format"] = "dummy"
        on = stack.enter_context(sgl.Runtime(model_path=path, **options))
        off = stack.enter_context(sgl.Runtime(model_path=path, disable_radix_cache=True, **options))
        result = {
            "model": args.model or "sapling",
            "machine": platform.platform(),
            "programs": args.programs,
            "repeats": args.repeats,
            "programs_per_s": measure(args, on, off),
        }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
