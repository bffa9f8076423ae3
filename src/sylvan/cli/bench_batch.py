"""`sylvan bench batch`: times the steps of single batches."""

from __future__ import annotations

import itertools
from typing import Any

from sylvan.bench.results import append, check_writable, origin
from sylvan.cli.bench_offline import collect_settings, model_keywords
from sylvan.cli.main import DONE, Spec
from sylvan.config.flags import Parsed
from sylvan.config.load import dump
from sylvan.config.schema import ONE_BATCH
from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.errors import ConfigError

SPEC = Spec(
    usage="bench batch [MODEL] [flags]",
    doc="Load MODEL and time the steps of batches of random prompts, prefill and decode, without "
    "scheduler and HTTP. Takes the settings of `sylvan serve` in addition to its own.",
    tree=ONE_BATCH,
)
_COLUMNS = (
    ("batch", "batch_size", "{}"),
    ("input", "input_len", "{}"),
    ("output", "output_len", "{}"),
    ("prefill ms", "prefill_latency", "{:.2f}"),
    ("tokens/s", "prefill_throughput", "{:.0f}"),
    ("decode ms", "median_decode_latency", "{:.3f}"),
    ("p99 ms", "p99_decode_latency", "{:.3f}"),
    ("tokens/s", "median_decode_throughput", "{:.0f}"),
    ("total ms", "total_latency", "{:.1f}"),
)


def run(args: Parsed) -> int:
    from sylvan.bench.batch import BatchBench, BatchShape, figures
    from sylvan.runtime.engine.build import build_scheduler, resolved  # `--help` needs no torch

    loaded = collect_settings(ONE_BATCH, args)
    batch = loaded.config.batch
    if batch.file is not None:
        check_writable(batch.file, "batch.file")
    config = resolved(gather(from_keywords(model_keywords(loaded.given))).config)
    if config.parallel.ranks > 1:
        raise ConfigError("bench batch: one process holds the model; leave out --tp and --pp")
    sizes = itertools.product(batch.sizes, batch.input_tokens, batch.output_tokens)
    shapes = [BatchShape(*numbers) for numbers in sizes]
    built = build_scheduler(config, lambda outputs: None)
    try:
        vocab, context = (int(built.facts[name] or 0) for name in ("vocab_size", "context_len"))
        batches = BatchBench(built.executor, vocab, context, seed=batch.seed)
        for shape in shapes:
            batches.check(shape)
        print("".join(f"{title:>12}" for title, _, _ in _COLUMNS), flush=True)
        for shape in shapes:
            batches.run(shape)  # warm-up
            runs = [batches.run(shape) for _ in range(batch.repeats)]
            found = figures(shape, runs)
            print(_row(found), flush=True)
            if batch.file is not None:
                about = {"run_name": batch.tag, "model": config.model, "origin": origin()}
                settings = dump(loaded.config, defaults=False, schema=ONE_BATCH)
                append(batch.file, {**about, **found, "config": settings})
    finally:
        built.close()
    return DONE


def _row(found: dict[str, Any]) -> str:
    texts = [form.format(_shown(name, found.get(name))) for _, name, form in _COLUMNS]
    return "".join(f"{text:>12}" for text in texts)


def _shown(name: str, value: Any) -> Any:
    if value is None:  # a single output token needs no decode step
        return float("nan")
    return value * 1000 if name.endswith("_latency") else value
