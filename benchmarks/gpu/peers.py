"""transformers beside us: the same tokens on small models, and its continuous batching."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from engine import Served, Way, release, serve
from kernels import Bench
from shapes import Shape

from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions

PROMPTS = ([5, 9, 3, 7], [11] * 23, list(range(1, 60)))
NEW = 12


def same_tokens(bench: Bench, folder: Path) -> None:
    """Greedy decoding in float32 of small random models."""
    import transformers

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
        equal = sum(
            _greedy(model, bench, prompt) == _ours(bench, path, prompt) for prompt in PROMPTS
        )
        what = f"{name}: prompts with the tokens of transformers"
        bench.report.add("check", what, float(equal), f"of {len(PROMPTS)}")


def _greedy(model, bench: Bench, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device=bench.device)
    with torch.inference_mode():
        for _ in range(NEW):
            best = model(ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, best), 1)
    return ids[0, len(prompt) :].tolist()


def _ours(bench: Bench, path: Path, prompt: list[int]) -> list[int]:
    served = Served.__new__(Served)
    outputs: list[int] = []
    _around(served, bench, path, lambda outs: outputs.extend(t for o in outs for t in o.token_ids))
    served.add(np.array(prompt, np.int32), NEW)
    served.run()
    return outputs


def _around(served: Served, bench: Bench, path: Path, emit: Callable[..., None]) -> None:
    """A scheduler around a small model of a checkpoint."""
    from sylvan.runtime.cache.build import kv_cache
    from sylvan.runtime.sched.limits import Limits, Parts
    from sylvan.runtime.sched.policies import schedule_policy
    from sylvan.runtime.sched.scheduler import Scheduler

    cpu = bench.device.type == "cpu"
    sizes = {"page_size": 16, "num_pages": 64, "max_batch_tokens": 128, "max_running_reqs": 4}
    served.executor, served.facts = build_executor(
        path,
        LocalOptions(
            **sizes, device=bench.platform.facts.name, attention="dense" if cpu else "auto"
        ),
        platform=bench.platform,
    )
    parts = Parts(
        cache=kv_cache(64, 16, "radix", "lru"),
        executor=served.executor,
        policy=schedule_policy("fcfs"),
        emit=emit,
    )
    limits = Limits(max_batch_tokens=128, max_running_reqs=4, inflight=2)
    served.scheduler = Scheduler(parts, limits)
    served.given = served._number = 0
    served._rng = np.random.default_rng(0)


def continuous_batching(bench: Bench, folder: Path, shape: Shape) -> None:
    """Tokens a second of transformers' `generate_batch` against ours, same shape and requests."""
    import transformers

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
    with torch.device(bench.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=bench.dtype).eval()
    if bench.tiny:
        return  # only that it can be built; its loop is not for CPUs
    generation = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    model.set_attn_implementation("paged|sdpa")
    inputs = [prompt.tolist() for prompt in prompts]
    model.generate_batch(inputs=inputs[:2], generation_config=generation)
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=inputs, generation_config=generation)
    seconds = time.perf_counter() - start
    tokens = sum(len(out.generated_tokens) for out in outputs.values())
    theirs = tokens / seconds
    bench.report.add("peer", f"{shape.name}: transformers, {count} requests", theirs, "tokens/s")
    bench.report.add("peer", f"{shape.name}: Sylvan over transformers", ours / theirs, "x")
