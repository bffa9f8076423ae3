"""Compares with transformers: equal tokens on small models, speed of continuous batching."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from engine import Served, Way, release, serve
from kernels import Bench
from shapes import Shape

PROMPTS = ([5, 9, 3, 7], [11] * 23, list(range(1, 60)))
NEW = 12


def same_tokens(bench: Bench, folder: Path) -> None:
    """Compare greedy decoding in float32 of small random models."""
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
    }
    configs = {
        "Llama": transformers.LlamaConfig(**sizes),
        "Qwen3": transformers.Qwen3Config(**sizes, head_dim=16),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        path = folder / f"small-{name}"
        model.save_pretrained(path)
        model = model.to(bench.device)
        want = [_greedy(model, bench, prompt) for prompt in PROMPTS]
        equal = sum(mine == theirs for mine, theirs in zip(_ours(bench, path), want, strict=True))
        what = f"{name}: prompts with the tokens of transformers"
        bench.report.add("check", what, float(equal), f"of {len(PROMPTS)}")


def _greedy(model, bench: Bench, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device=bench.device)
    with torch.inference_mode():
        for _ in range(NEW):
            best = model(ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, best), 1)
    return ids[0, len(prompt) :].tolist()


def _ours(bench: Bench, path: Path) -> list[list[int]]:
    served = Served(bench, path, Way(), context=128, pages=64, real=True)
    rids = [served.add(np.array(prompt, np.int32), NEW) for prompt in PROMPTS]
    served.run()
    tokens = [served.tokens[rid] for rid in rids]
    release(bench, served)
    return tokens


def continuous_batching(bench: Bench, folder: Path, shape: Shape) -> None:
    """Compare tokens per second with transformers' `generate_batch`, for the same shape and
    requests.
    """
    count, length, new = (2, 16, 4) if bench.tiny else (32, 256, 64)
    served = serve(bench, folder, shape, Way())
    prompts = [served.prompt(length) for _ in range(count)]
    for _ in range(2):  # the first time warms up
        for prompt in prompts:
            served.add(prompt, new)
        ours = count * new / served.run()
        served.scheduler.flush_cache()
    release(bench, served)
    bench.report.add("peer", f"{shape.name}: Sylvan, {count} requests", ours, "tokens/s")
    config = transformers.AutoConfig.for_model(
        **{k: v for k, v in shape.config.items() if k not in ("architectures", "torch_dtype")}
    )
    # Its loop runs in a thread of its own, which knows nothing of this one's modes.
    with torch.inference_mode(mode=False), torch.device(bench.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=bench.dtype).eval()
    with torch.inference_mode(mode=False):
        theirs = _their_rate(bench, model, [prompt.tolist() for prompt in prompts], new)
    bench.report.add("peer", f"{shape.name}: transformers, {count} requests", theirs, "tokens/s")
    bench.report.add("peer", f"{shape.name}: Sylvan over transformers", ours / theirs, "x")


def _their_rate(bench: Bench, model: Any, inputs: list[list[int]], new: int) -> float:
    """Tokens a second of `generate_batch`, warmed up."""
    options = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    room = None  # as much memory as there is
    if bench.tiny:
        room = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    model.set_attn_implementation("sdpa")  # becomes the paged kind by itself

    def generate(some: list[list[int]]) -> int:
        outputs = model.generate_batch(
            inputs=some, generation_config=options, continuous_batching_config=room
        )
        return sum(len(out.generated_tokens) for out in outputs.values())

    generate(inputs[:2])
    start = time.perf_counter()
    tokens = generate(inputs)
    seconds = time.perf_counter() - start
    if tokens != len(inputs) * new:
        raise RuntimeError(f"transformers gave {tokens} tokens instead of {len(inputs) * new}")
    return tokens / seconds
