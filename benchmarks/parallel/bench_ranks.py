"""Claims: ranks cost little.

Paired rounds on one machine, with the same number of threads in total:

`tp`: two ranks of one thread decode and prefill at least 0.85 times as fast as one process of two
threads. `ep`: the same with whole experts on two ranks, for a model of 128 experts, against shares
of each expert. `bits`: the cost of `parallel.same_bits` on one rank; the goal is at most 5 %. `pp`:
two pipeline stages of one thread, at least 0.85 with 16 requests in flight, in a batch per stage or
in one for both; with one request, one stage waits for the other. `bubble`: the share of time that
stages wait, against one process of one thread. `dp`: data-parallel attention on two ranks, against
shares of the heads, for a model of 128 experts. `a2a`: outputs of experts sent to the ranks that
sum them, against all of them sent to all. `parts`: microseconds of a decode step of 8 requests by
op, on each of two ranks. `overlap`: steps of two ranks that are launched ahead. `bytes`: what a
rank sends per token, computed from the sizes of the model. `collectives`: all-reduce of 8 KB over
shared memory at least 5 times as fast as over gloo, of 1 MB twice. `start`: seconds to the first
answer from real files, and the peak memory of each rank, most of which is its share of the weights.

    python -m benchmarks.parallel.bench_ranks --what tp ep bits pp bubble dp a2a parts overlap bytes
        collectives start [--shape FILE] [--rounds 7] [--tiny]

`--shape benchmarks/one_billion.json` has the sizes of a model of 1.2 billion parameters.

Weights are random. Results are JSON lines; a ratio above 1 means that the second is faster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from sylvan import Engine
from sylvan.kernels.collective.gloo import file_store, join_ranks
from sylvan.kernels.native.library import load
from sylvan.kernels.native.ranks import SharedRanks
from sylvan.protocol.commands import StartProfile, StopProfile

SHAPE = Path(__file__).parents[1] / "half_billion.json"
WEIGHTS = "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 96}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
BATCHES, PROMPT, DECODED = (1, 8, 32), 512, 32
BATCHES_OF_STAGES = (1, 16, 32)
OF_EXPERTS = ("ep", "dp", "a2a")
ONE, TWO = {"tp_size": 1, "threads": 2}, {"tp_size": 2, "threads": 1}
WAYS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "tp": {"one process": ONE, "two ranks": TWO},
    "ep": {
        "one process": ONE,
        "shares of experts": TWO,
        "whole experts": {**TWO, "ep_size": 2},
    },
    "bits": {"plain sums": {**ONE, "parallel__same_bits": False}, "same bits": ONE},
    "pp": {
        "one process": ONE,
        "two stages": {"pp_size": 2, "threads": 1},
        "two stages, one batch": {"pp_size": 2, "threads": 1, "parallel__pp_batch": 32},
    },
    "bubble": {
        "one thread": {"tp_size": 1, "threads": 1},
        "two stages": {"pp_size": 2, "threads": 1},
    },
    "dp": {"shares of heads": TWO, "own requests": {**TWO, "attn_dp_size": 2}},
    "a2a": {
        "to all": {**TWO, "ep_size": 2},
        "all to all": {**TWO, "ep_size": 2, "parallel__expert_exchange": "all_to_all"},
    },
    "overlap": {
        "in turn": {**TWO, "scheduler__overlap": "off"},
        "launched ahead": {**TWO, "scheduler__overlap": "on"},
    },
}
SIZES = {"8 KB": 8 << 10, "1 MB": 1 << 20}


def write_model(folder: Path, shape: Mapping[str, Any], *, experts: bool) -> Path:
    """A checkpoint without weights, with the tokenizer of the built-in model."""
    kind = ("Qwen3MoeForCausalLM", "qwen3_moe") if experts else ("Qwen3ForCausalLM", "qwen3")
    config = {"architectures": [kind[0]], "model_type": kind[1], **shape}
    config |= {"norm_topk_prob": True, **EXPERTS} if experts else {}
    (folder / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER:
        source = Path(str(files("sylvan") / "assets" / "sapling" / name))
        if source.exists():
            shutil.copy(source, folder / name)
    return folder


@contextmanager
def engines(model: Path, ways: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Engine]]:
    flags = {"load_format": "dummy", "device": "cpu", "dtype": "bfloat16", "context_len": 2048}
    flags |= {"max_total_tokens": 32 * (PROMPT + 64), "processes": "many", "log_level": "warning"}
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(Engine(model_path=str(model), **{**flags, **way}))
            for name, way in ways.items()
        }
        yield made


def seconds(engine: Engine, batch: int, prompt: int, tokens: int, seed: int) -> float:
    """Return the seconds for `batch` requests with new prompts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 200, (batch, prompt), generator=generator).tolist()
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    start = time.perf_counter()
    engine.generate(input_ids=ids, sampling_params=params)
    return time.perf_counter() - start


def compare(what: str, model: Path, args: argparse.Namespace) -> None:
    """Run paired rounds of all ways; print a line for each row."""
    tokens = 4 if args.tiny else DECODED
    prompt = 16 if args.tiny else PROMPT
    batches = BATCHES_OF_STAGES if what in ("pp", "bubble") else BATCHES
    rows = {f"decode {n}": (n, 8, tokens) for n in batches} | {f"prompt {prompt}": (1, prompt, 1)}
    with engines(model, WAYS[what]) as made:
        for row, (batch, length, count) in rows.items():
            spent: dict[str, list[float]] = {name: [] for name in made}
            for number in range(args.rounds + 1):
                for name, engine in made.items():
                    spent[name].append(seconds(engine, batch, length, count, number))
            first, *others = spent
            for other in others:
                pairs = zip(spent[first][1:], spent[other][1:], strict=True)
                ratio = statistics.median(one / two for one, two in pairs)
                found = {"ratio": round(ratio, 3)}
                if what == "bubble":  # two stages can take half of the time at best
                    found["bubble"] = round(1 - ratio / 2, 3)
                report(what=what, row=row, first=first, second=other, **found)


def one_rank(kind: str, path: str, rank: int, sizes: Mapping[str, int], rounds: int, out: Any):
    torch.set_num_threads(1)
    if kind == "shared":
        group: Any = SharedRanks(load(), Path(path), rank, 2, 60.0)
        group.join(60.0)
    else:
        group = join_ranks(file_store(path, 2), rank, 2, 60.0, 60.0)
    found: dict[str, float] = {}
    for name, num_bytes in sizes.items():
        x = torch.ones(num_bytes // 4)
        times: list[float] = []
        for _ in range(20 * rounds):
            start = time.perf_counter()
            group.all_sum(x)
            times.append(time.perf_counter() - start)
        found[name] = statistics.median(times)
    if rank == 0:
        out.put(found)


def collectives(args: argparse.Namespace) -> None:
    """Return the microseconds of an all-reduce between two processes, by each way."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, dict[str, float]] = {}
    for kind in ("shared", "gloo"):
        with tempfile.TemporaryDirectory() as folder:
            out: Any = context.Queue()
            given = kind, f"{folder}/meeting"
            others = [
                context.Process(target=one_rank, args=(*given, rank, SIZES, args.rounds, out))
                for rank in range(2)
            ]
            for other in others:
                other.start()
            found[kind] = out.get(timeout=300)
            for other in others:
                other.join(60)
    for size in SIZES:
        shared, gloo = found["shared"][size], found["gloo"][size]
        report(
            what="collectives",
            row=size,
            shared_us=round(shared * 1e6, 1),
            gloo_us=round(gloo * 1e6, 1),
            ratio=round(gloo / shared, 2),
        )


def start(model: Path, shape: Mapping[str, Any]) -> None:
    """Return the seconds to the first answer from real files, and the peak memory of each rank."""
    write_weights(model, shape)
    weights = (model / WEIGHTS).stat().st_size >> 20
    small = {"load_format": "safetensors", "load_cache": None, "max_total_tokens": 4096}
    for name, way in {**WAYS["tp"], "two stages": WAYS["pp"]["two stages"]}.items():
        begun = time.perf_counter()
        with engines(model, {name: {**way, **small}}) as made:
            seconds(made[name], 1, 8, 1, 0)
            spent = round(time.perf_counter() - begun, 2)
            peaks = peaks_of_ranks()
        report(what="start", row=name, seconds=spent, peak_MB=peaks, weights_MB=weights)


def write_weights(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write random weights of a Qwen3 of this shape with tied embeddings."""
    generator = torch.Generator().manual_seed(0)
    dim, inner, width = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = (shape[f"num_{kind}_heads"] * width for kind in ("attention", "key_value"))

    def matrix(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)

    found = {"model.embed_tokens.weight": matrix(shape["vocab_size"], dim)}
    found["model.norm.weight"] = torch.ones(dim, dtype=torch.bfloat16)
    for layer in range(shape["num_hidden_layers"]):
        start = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{start}.{name}.weight"] = torch.ones(dim, dtype=torch.bfloat16)
        for name in ("q_norm", "k_norm"):
            found[f"{start}.self_attn.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
        sizes = {"q": (queries, dim), "k": (keys, dim), "v": (keys, dim), "o": (dim, queries)}
        for name, (rows, columns) in sizes.items():
            found[f"{start}.self_attn.{name}_proj.weight"] = matrix(rows, columns)
        for name in ("gate", "up"):
            found[f"{start}.mlp.{name}_proj.weight"] = matrix(inner, dim)
        found[f"{start}.mlp.down_proj.weight"] = matrix(dim, inner)
    save_file(found, folder / WEIGHTS, metadata={"format": "pt"})


def peaks_of_ranks() -> dict[str, int]:
    """Return the peak memory of each rank's process in MB, in order of ranks."""
    kinds = {"scheduler_process": "first rank", "rank_process": "another rank"}
    found: dict[str, int] = {}
    for child in psutil.Process().children(recursive=True):
        module = child.cmdline()[-1].rpartition(".")[2]
        if module in kinds:
            found[kinds[module]] = _peak(child)
    return dict(sorted(found.items(), reverse=True))


def parts(model: Path, args: argparse.Namespace) -> None:
    """Return the microseconds per step by op, on each rank."""
    tokens = 4 if args.tiny else DECODED
    for name, way in WAYS["tp"].items():
        with engines(model, {name: way}) as made, tempfile.TemporaryDirectory() as folder:
            engine = made[name]
            seconds(engine, 8, 8, tokens, 0)
            control(engine, StartProfile(folder, "parts", activities=()))
            for number in range(args.rounds):
                seconds(engine, 8, 8, tokens, 1 + number)
            control(engine, StopProfile())
            for rank, path in enumerate(sorted(Path(folder).glob("*-ops.json"))):
                found: dict[str, float] = {}
                for op in json.loads(path.read_text())["ops"]:
                    found[op["op"]] = found.get(op["op"], 0.0) + op["us_per_step"]
                most = sorted(found.items(), key=lambda entry: -entry[1])
                report(what="parts", row=name, process=rank, us={k: round(v) for k, v in most})


def control(engine: Engine, command: StartProfile | StopProfile) -> None:
    """Run a command between steps, on all ranks."""
    reply = engine._wait(engine._runtime.manager.control(command))
    if not reply.ok:
        raise RuntimeError(reply.message)


def sent_bytes(shape: Mapping[str, Any]) -> None:
    """Return the bytes that a rank sends per token: float32 rows of all sums and links."""
    row = 4 * shape["hidden_size"]
    sums = 2 * shape["num_hidden_layers"] + 1  # and the embedding
    report(what="bytes", row="two ranks", sums=sums, bytes_a_token=sums * row)
    report(what="bytes", row="two stages", links=1, bytes_a_token=row)


def _peak(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) >> 10


def report(**found: object) -> None:
    print(json.dumps(found), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = [*WAYS, "parts", "bytes", "collectives", "start"]
    parser.add_argument("--what", nargs="+", choices=every, default=every)
    parser.add_argument("--shape", type=Path, default=SHAPE)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    shape = {"head_dim": 64, **json.loads(args.shape.read_text()), **(TINY if args.tiny else {})}
    for what in args.what:
        if what == "collectives":
            collectives(args)
            continue
        if what == "bytes":
            sent_bytes(shape)
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder), shape, experts=what in OF_EXPERTS)
            if what == "start":
                start(model, shape)
            elif what == "parts":
                parts(model, args)
            else:
                compare(what, model, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
