"""Claims: native families are faster than the path through transformers, and that path is no
slower than transformers' own generate: at least 0.9 of it alone, at least 3 times with 16 requests.

    python benchmarks/models/bench_families.py [--families NAME ...] [--all] [--output FILE]

Each family is a random checkpoint of half a billion parameters in bfloat16. Three ways answer the
same prompts greedily with equally many tokens: the native model, the same architecture with its
native file hidden, and `generate` of transformers on a padded batch (all prompts have one length,
so nothing is padded). A number is tokens of answers per second, prompts included, best of the
repeats. Results are JSON lines; progress goes to stderr. The default takes about 8 minutes on two
cores; `--tiny` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
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

from sylvan.config.env import for_compute, threads_are_calm
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.models import registry
from sylvan.runtime.sched.limits import Limits, Parts
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler

BATCHES = 1, 16
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
}
"""Config class and what it has besides the common shape; the first four run by default."""
TINY_CHANGES = {"num_key_value_heads": 4, "word_embed_proj_dim": 64, "ffn_dim": 96}
BY_DEFAULT = tuple(FAMILIES)[:4]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=BY_DEFAULT)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    names = tuple(FAMILIES) if args.all else args.families
    lines = []
    for number, name in enumerate(names, 1):
        say(f"[{number}/{len(names)}] {name}: writing the checkpoint")
        with tempfile.TemporaryDirectory() as folder:
            write(name, Path(folder), tiny=args.tiny)
            row = {"family": name} | measure(Path(folder), args.prompt, args.new, args.repeats)
        lines.append(json.dumps(row))
        print(lines[-1], flush=True)
        if args.output:
            args.output.write_text("\n".join(lines) + "\n")
    return 0


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def write(name: str, path: Path, *, tiny: bool) -> None:
    """A random checkpoint in bfloat16, as transformers writes it."""
    kind, changes = FAMILIES[name]
    shape = {**HALF_BILLION, **changes}
    if tiny:
        shape |= TINY | {k: v for k, v in TINY_CHANGES.items() if k in shape}
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**shape)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)


def measure(path: Path, prompt: int, new: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of all three ways for each batch, and what follows from them."""
    architecture = json.loads((path / "config.json").read_text())["architectures"][0]
    found: dict[str, Any] = {"architecture": architecture, "prompt": prompt, "new": new}
    ways: Mapping[str, Callable[[], Way]] = {
        "native": lambda: Served(path, prompt + new),
        "fallback": lambda: hidden(architecture, lambda: Served(path, prompt + new)),
        "transformers": lambda: Generate(path),
    }
    rng = np.random.default_rng(0)
    for kind, build in ways.items():
        way = build()
        found[f"{kind}_runs"] = way.name
        for batch in BATCHES:
            speeds = []
            for _ in range(repeats):
                prompts = rng.integers(3, way.vocab_size, (batch, prompt))
                start = time.perf_counter()
                tokens = way.answer(prompts, new)
                speeds.append(tokens / (time.perf_counter() - start))
            found[f"{kind}_{batch}"] = round(max(speeds), 2)
            say(f"  {kind}, {batch} at once: {max(speeds):.1f} tokens/s")
        way.close()
        del way
        gc.collect()
    for batch in BATCHES:
        native, fallback, other = (found[f"{kind}_{batch}"] for kind in ways)
        found[f"native_over_fallback_{batch}"] = round(native / fallback, 2)
        found[f"fallback_over_transformers_{batch}"] = round(fallback / other, 2)
    return found


class Way:
    """One way to answer."""

    name = ""
    vocab_size = 0

    def answer(self, prompts: np.ndarray, new: int) -> int:
        """Answer all prompts at once; returns how many tokens were generated."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what it holds."""


class Served(Way):
    """Scheduler, cache and executor in this process."""

    def __init__(self, path: Path, length: int) -> None:
        batch, pages = max(BATCHES), max(BATCHES) * (-(-length // PAGE) + 1) + 1
        limits = Limits(max_running_reqs=batch, max_batch_tokens=2048, inflight=1)
        options = LocalOptions(
            page_size=PAGE,
            num_pages=pages,
            max_batch_tokens=limits.max_batch_tokens,
            max_running_reqs=batch,
            context_len=length + PAGE,
            dtype="bfloat16",
        )
        self._executor, facts = build_executor(path, options)
        self.name, self.vocab_size = facts.runner.split(" ", maxsplit=1)[0], facts.vocab_size
        self._tokens = self._count = 0
        self._scheduler = Scheduler(
            Parts(
                cache=kv_cache(pages, PAGE, "radix", "lru", facts.num_states),
                executor=self._executor,
                policy=schedule_policy("fcfs"),
                emit=self._emit,
            ),
            limits,
        )

    def answer(self, prompts: np.ndarray, new: int) -> int:
        self._tokens = 0
        for ids in prompts:
            self._count += 1
            sampling = SamplingParams(
                temperature=0.0, max_new_tokens=new, ignore_eos=True, sampling_seed=0
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
        assert self._tokens == prompts.shape[0] * new, "an answer is too short"
        return self._tokens

    def close(self) -> None:
        self._executor.close()

    def _emit(self, outputs: Sequence[Any]) -> None:
        self._tokens += sum(len(out.token_ids) for out in outputs)


class Generate(Way):
    """`generate` of transformers."""

    name = "generate"

    def __init__(self, path: Path) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16
        )
        self.vocab_size = self._model.config.vocab_size

    def answer(self, prompts: np.ndarray, new: int) -> int:
        ids = torch.from_numpy(prompts)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].numel()


def hidden(architecture: str, build: Callable[[], Way]) -> Way:
    """Build while nothing native serves the architecture."""
    with _without(architecture):
        return build()


@contextmanager
def _without(architecture: str) -> Iterator[None]:
    module = registry.MODELS.pop(architecture)
    try:
        yield
    finally:
        registry.MODELS[architecture] = module


if __name__ == "__main__":
    if not threads_are_calm():  # as in the processes of a server
        os.execve(sys.executable, [sys.executable, *sys.argv], for_compute())
    sys.exit(main())
