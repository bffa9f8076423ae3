"""Claims: native families are faster than the transformers path, which is no slower than
`generate`.

The path through transformers reaches at least 0.9 of the speed of `generate` on single batches, and
at least 3 times its speed on mixed requests. Native kernels are faster than PyTorch alone
(`--families lfm2 qwen3-next --ways native plain`). Step programs through JAX on this CPU are no
slower than `generate` (`--families qwen2 --dtype float32 --ways jax transformers`, and the package
jax): a check of the lowering, not of a TPU. Compile time does not count.

    python benchmarks/models/bench_families.py [--families NAME ...] [--all] [--output FILE]

Each family is a random checkpoint of half a billion parameters in bfloat16. Three ways answer the
same prompts greedily: the native model, the same architecture with its native file hidden, and
`generate` of transformers. Each runs in a separate process, ours with the environment of a server's
processes, transformers' with that of this program. Numbers are output tokens per second, including
the time of the prompts, in three rows:

`1` and `16`: this many requests with equally long prompts and answers, as one batch. Nothing is
padded and no request waits for another: the best case of `generate`. Best of the repeats.

`mixed`: what a server sees: requests with prompts of 32 to 256 tokens and answers of 8 to 128, from
a fixed seed. We run 16 at a time and admit the next one when one ends; `generate` gets them in
order, in left-padded batches of 16, each of which runs to its longest answer. Only requested tokens
count. Measured once, after the rows above.

Results are JSON lines; progress goes to stderr. `--tiny` only checks that everything runs, and
`--ways` selects ways, and so the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from sylvan.config.env import for_compute
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import ExecutorParts, LocalOptions
from sylvan.runtime.features.standard import standard_capabilities
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from sylvan.runtime.models import registry
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler

BATCHES = 1, 16
AT_ONCE = max(BATCHES)
PROMPTS, ANSWERS = (32, 256), (8, 128)
"""Fewest and most tokens of mixed requests."""
TINY_PROMPTS, TINY_ANSWERS = (4, 24), (1, 6)
PAGE = 16
HALF_BILLION = json.loads((Path(__file__).parents[1] / "half_billion.json").read_text()) | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
EXPERTS = {
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 304,
}
LATENT = EXPERTS | {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 14,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
CHUNKED = EXPERTS | {
    "num_experts_per_tok": 1,
    "intermediate_size": 304,
    "intermediate_size_mlp": 4864,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 1024,
    "head_dim": 64,
}
HYBRID = {
    "num_local_experts": 0,
    "layer_types": ["mamba", "mamba", "mamba", "attention"] * 6,
    "mamba_n_heads": 28,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "shared_intermediate_size": 4864,
}
SHORT = {"layer_types": ["conv", "conv", "full_attention"] * 8}
DELTA = EXPERTS | {
    "head_dim": 64,
    "linear_num_key_heads": 7,
    "linear_num_value_heads": 14,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "shared_expert_intermediate_size": 304,
}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 64}),
    "deepseek-v3": ("DeepseekV3Config", LATENT),
    "qwen2": ("Qwen2Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 1024}),
    "gemma2": ("Gemma2Config", {"head_dim": 64}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 64}),
    "glm4": ("Glm4Config", {"head_dim": 64}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "gpt-oss": ("GptOssConfig", EXPERTS | {"head_dim": 64, "intermediate_size": 304}),
    "granite": ("GraniteConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "phi3": ("Phi3Config", {}),
    "cohere": ("CohereConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 4864, "word_embed_proj_dim": 896}),
    "llama4": ("Llama4TextConfig", CHUNKED),
    "apertus": ("ApertusConfig", {}),
    "ministral3": ("Ministral3Config", {"head_dim": 64}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 64}),
    "lfm2": ("Lfm2Config", SHORT),
    "mamba2": ("Mamba2Config", {"num_heads": 28, "head_dim": 64, "state_size": 128, "n_groups": 1}),
    "granite4": ("GraniteMoeHybridConfig", HYBRID),
    "qwen3-next": ("Qwen3NextConfig", DELTA),
}
"""Config class and fields besides those of the common shape; the first four run by default."""
TINY_CHANGES = {
    "num_key_value_heads": 4,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "intermediate_size_mlp": 96,
    "num_heads": 2,
    "mamba_n_heads": 2,
}
BY_DEFAULT = tuple(FAMILIES)[:4]
BY_DEFAULT_WAYS = "native", "fallback", "transformers"
RATIOS = (
    ("native", "plain"),
    ("native", "fallback"),
    ("fallback", "transformers"),
    ("jax", "transformers"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=BY_DEFAULT)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=BY_DEFAULT_WAYS)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--requests", type=int, default=48, help="mixed requests; 0: none")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(time_way(args)), flush=True)
        return 0
    names = tuple(FAMILIES) if args.all else args.families
    lines = []
    for number, name in enumerate(names, 1):
        say(f"[{number}/{len(names)}] {name}: writing the checkpoint")
        with tempfile.TemporaryDirectory() as folder:
            write(name, Path(folder), tiny=args.tiny)
            row = {"family": name} | measure(Path(folder), args)
        lines.append(json.dumps(row))
        print(lines[-1], flush=True)
        if args.output:
            args.output.write_text("\n".join(lines) + "\n")
    return 0


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def write(name: str, path: Path, *, tiny: bool) -> None:
    """Write a random checkpoint in bfloat16, with transformers."""
    kind, changes = FAMILIES[name]
    shape = {**HALF_BILLION, **changes}
    if tiny:
        shape |= TINY | {k: v for k, v in TINY_CHANGES.items() if k in shape}
        if kinds := shape.get("layer_types"):
            shape["layer_types"] = [kinds[0], kinds[-1]]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**shape)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second of all ways, each in a separate process, and their ratios."""
    found: dict[str, Any] = {"architecture": architecture(path)}
    found |= {"prompt": args.prompt, "new": args.new, "requests": args.requests}
    for way in args.ways:
        command = [sys.executable, __file__, "--way", way, "--checkpoint", str(path)]
        for name in ("prompt", "new", "repeats", "requests", "dtype"):
            command += [f"--{name}", str(getattr(args, name))]
        command += ["--tiny"] if args.tiny else []
        env = dict(os.environ) if way == "transformers" else for_compute()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
        found |= json.loads(done.stdout.splitlines()[-1])
    for row in (*BATCHES, "mixed"):
        for one, other in RATIOS:
            mine, others = found.get(f"{one}_{row}"), found.get(f"{other}_{row}")
            if mine and others:
                found[f"{one}_over_{other}_{row}"] = round(mine / others, 2)
    return found


def time_way(args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second of one way: each batch, then mixed requests."""
    kind, path = args.way, args.checkpoint
    rng = np.random.default_rng(0)  # the same requests for all
    lengths, answers = (TINY_PROMPTS, TINY_ANSWERS) if args.tiny else (PROMPTS, ANSWERS)
    length = max(args.prompt + args.new, lengths[1] + answers[1])
    say(f"  {kind}: loading")
    way = WAYS[kind](path, length, args.dtype)
    found: dict[str, Any] = {f"{kind}_runs": way.name}
    for batch in BATCHES:
        speeds = []
        for _ in range(args.repeats):
            prompts = list(rng.integers(3, way.vocab_size, (batch, args.prompt)))
            speeds.append(timed(way, prompts, [args.new] * batch))
        found[f"{kind}_{batch}"] = max(speeds)
        say(f"  {kind}, {batch} at once: {max(speeds)} tokens/s")
    if args.requests:
        rng = np.random.default_rng(1)
        sizes = rng.integers(lengths[0], lengths[1] + 1, args.requests)
        new = rng.integers(answers[0], answers[1] + 1, args.requests).tolist()
        prompts = [rng.integers(3, way.vocab_size, n) for n in sizes]
        say(f"  {kind}: {args.requests} mixed requests for {sum(new)} tokens")
        found[f"{kind}_mixed"] = timed(way, prompts, new)
        say(f"  {kind}, mixed: {found[f'{kind}_mixed']} tokens/s")
    way.close()
    return found


def timed(way: Way, prompts: Sequence[np.ndarray], new: Sequence[int]) -> float:
    """Return the requested tokens per second."""
    start = time.perf_counter()
    way.answer(prompts, new)
    return round(sum(new) / (time.perf_counter() - start), 2)


def architecture(path: Path) -> str:
    return json.loads((path / "config.json").read_text())["architectures"][0]


class Way:
    """One implementation that answers prompts."""

    name = ""
    vocab_size = 0

    def answer(self, prompts: Sequence[np.ndarray], new: Sequence[int]) -> None:
        """Answer each prompt with this many tokens."""
        raise NotImplementedError

    def close(self) -> None:
        """Free its memory."""


class Served(Way):
    """Scheduler, cache and executor in this process; `AT_ONCE` requests run concurrently."""

    def __init__(
        self, path: Path, length: int, dtype: str, runner: str = "auto", device: str = "cpu"
    ) -> None:
        pages = AT_ONCE * (-(-length // PAGE) + 1) + 1
        limits = SchedulerLimits(max_running_reqs=AT_ONCE, max_batch_tokens=2048, inflight=1)
        options = LocalOptions(
            page_size=PAGE,
            num_pages=pages,
            max_batch_tokens=limits.max_batch_tokens,
            max_running_reqs=AT_ONCE,
            context_len=length + PAGE,
            dtype=dtype,
            device=device,
            runner=runner,
        )
        parts = ExecutorParts(STANDARD_WORKERS)
        self._executor, facts = build_executor(path, options, parts=parts)
        self.name, self.vocab_size = facts.runner, facts.vocab_size
        self._tokens = self._count = 0
        cache = kv_cache(self._executor.caps.kv_groups, "radix", "lru")
        self._scheduler = Scheduler(
            SchedulerDeps(
                cache=cache,
                capabilities=standard_capabilities(cache),
                executor=self._executor,
                policy=schedule_policy("fcfs"),
                emit=self._emit,
            ),
            limits,
        )

    def answer(self, prompts: Sequence[np.ndarray], new: Sequence[int]) -> None:
        self._tokens = 0
        for ids, count in zip(prompts, new, strict=True):
            self._count += 1
            sampling = SamplingParams(
                temperature=0.0, max_new_tokens=count, ignore_eos=True, sampling_seed=0
            )
            self._scheduler.add(
                GenerateRequest(
                    rid=str(self._count),
                    input_ids=ids.astype(np.int32),
                    output_ids=np.zeros(0, np.int32),
                    sampling=sampling,
                )
            )
        while self._scheduler.step() or not self._scheduler.idle:
            pass
        assert self._tokens == sum(new), "an answer is too short"

    def close(self) -> None:
        self._executor.close()

    def _emit(self, outputs: Sequence[Any]) -> None:
        self._tokens += sum(len(out.token_ids) for out in outputs)


class Generate(Way):
    """`generate` of transformers, on batches of at most `AT_ONCE` requests in order of arrival."""

    name = "generate"

    def __init__(self, path: Path, length: int, dtype: str) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype)
        )
        assert length <= self._model.config.max_position_embeddings
        self.vocab_size = self._model.config.vocab_size

    def answer(self, prompts: Sequence[np.ndarray], new: Sequence[int]) -> None:
        for first in range(0, len(prompts), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            self._batch(prompts[some], max(new[some]))

    def _batch(self, prompts: Sequence[np.ndarray], new: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert out.shape == (len(prompts), longest + new), "an answer is too short"


def hidden(path: Path, length: int, dtype: str) -> Way:
    """Build the model while its native implementation is hidden."""
    with _without(architecture(path)):
        return Served(path, length, dtype)


@contextmanager
def _without(name: str) -> Iterator[None]:
    module = registry.MODELS.pop(name)
    try:
        yield
    finally:
        registry.MODELS[name] = module


def plain(path: Path, length: int, dtype: str) -> Way:
    """Build the native model with PyTorch alone."""
    return Served(path, length, dtype, "eager")


def on_jax(path: Path, length: int, dtype: str) -> Way:
    """Build its step program for JAX."""
    return Served(path, length, dtype, device="jax")


WAYS: Mapping[str, Callable[[Path, int, str], Way]] = {
    "jax": on_jax,
    "native": Served,
    "plain": plain,
    "fallback": hidden,
    "transformers": Generate,
}


if __name__ == "__main__":
    sys.exit(main())
