"""Measures one peer with LoRA adapters: decodes without, with one, and with several; prints a line
for each.

Started by `compare_adapters.py` in the peer's environment.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers import PEERS, Job, LlamaCpp, Prompts
from worker import counted, random_prompts

GenerateWith = Callable[[Prompts, int, Sequence[int | None]], list[list[int]]]
"""Continues each prompt with the adapter of its number, or none."""
PROMPT = 32


def _sylvan(job: Job, adapters: Sequence[Path]) -> GenerateWith:
    from sylvan import Engine

    engine = Engine(
        model=str(job.model),
        dtype="bfloat16",
        threads=job.threads,
        context_len=1024,
        cache__prefix="none",
        scheduler__max_batch_tokens=2048,
        scheduler__max_running_reqs=32,
        lora_paths={path.name: str(path) for path in adapters},
        max_loras_per_batch=len(adapters),
    )

    def generate(prompts: Prompts, count: int, use: Sequence[int | None]) -> list[list[int]]:
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        names = [None if number is None else adapters[number].name for number in use]
        replies: Any = engine.generate(input_ids=prompts, sampling_params=params, lora_path=names)
        return [list(reply["output_ids"]) for reply in replies]

    return generate


def _vllm(job: Job, adapters: Sequence[Path]) -> GenerateWith:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=str(job.model),
        dtype="bfloat16",
        max_model_len=1024,
        enable_prefix_caching=False,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        disable_log_stats=True,
        seed=0,
        enable_lora=True,
        max_loras=len(adapters),
        max_lora_rank=16,
    )
    given = [LoRARequest(path.name, n + 1, str(path)) for n, path in enumerate(adapters)]

    def generate(prompts: Prompts, count: int, use: Sequence[int | None]) -> list[list[int]]:
        wanted = SamplingParams(
            max_tokens=count, min_tokens=count, ignore_eos=True, temperature=0, detokenize=False
        )
        inputs = [{"prompt_token_ids": p} for p in prompts]
        asked = [None if number is None else given[number] for number in use]
        found = llm.generate(inputs, wanted, use_tqdm=False, lora_request=asked)
        return [list(out.outputs[0].token_ids) for out in found]

    return generate


def write_gguf_adapter(folder: Path, arch: str, out: Path) -> None:
    """Write an adapter on queries and values in llama.cpp's format."""
    import gguf
    import numpy as np
    from safetensors.torch import load_file

    names = {"q_proj": "attn_q", "v_proj": "attn_v"}
    config = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(out, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]))
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        _, _, _, _, layer, _, module, part, _ = name.split(".")
        kind = gguf.GGMLQuantizationType.F32
        array = np.ascontiguousarray(tensor.float().numpy())
        own = f"blk.{layer}.{names[module]}.weight.{part.lower()}"
        writer.add_tensor(own, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama_cpp(job: Job, adapters: Sequence[Path]) -> GenerateWith:
    import llama_cpp as lc

    file = adapters[0] / "adapter.gguf"
    arch = json.loads((job.model / "config.json").read_text())["model_type"]
    write_gguf_adapter(adapters[0], arch, file)
    held = LlamaCpp(job)
    loaded = lc.llama_adapter_lora_init(held.model, str(file).encode())
    assert loaded, "llama.cpp cannot load the adapter"
    one, scale = (lc.llama_adapter_lora_p_ctypes * 1)(loaded), (ctypes.c_float * 1)(1.0)

    def generate(prompts: Prompts, count: int, use: Sequence[int | None]) -> list[list[int]]:
        assert len(set(use)) == 1, "one adapter for all requests of a context"
        some = int(use[0] is not None)
        assert lc.llama_set_adapters_lora(held.context, one, some, scale) == 0
        return held.generate(prompts, count)

    return generate


LOADERS = {"sylvan": _sylvan, "vllm": _vllm, "llama.cpp": _llama_cpp}


def measure(generate: GenerateWith, options: argparse.Namespace) -> None:
    uses: dict[str, list[int | None]] = {"none": [None], "1": [0]}
    if options.peer != "llama.cpp" and options.count > 1:
        uses[str(options.count)] = list(range(options.count))
    for size in options.batch:
        cases = {
            what: [use[n % len(use)] for n in range(size)]
            for what, use in uses.items()
            if len(use) <= max(size, 1)
        }
        for turn in range(-1, options.rounds):  # the first one warms up
            for what, use in cases.items():
                rate = decoded(generate, use, size, options.new, turn)
                if turn >= 0:
                    print(
                        f"\n{json.dumps({'batch': size, 'what': what, 'rate': rate})}", flush=True
                    )


def decoded(generate: GenerateWith, use: list[int | None], size: int, new: int, seed: int) -> float:
    """Return tokens per second after the first of each request."""

    def timed(count: int) -> float:
        prompts = random_prompts(size, PROMPT, 1000 + 10 * seed + count)
        same = counted(lambda asked, number: generate(asked, number, use))
        begun = time.perf_counter()
        same(prompts, count)
        return time.perf_counter() - begun

    first = timed(1)
    whole = timed(new + 1)
    return size * new / (whole - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=LOADERS)
    parser.add_argument("format")
    parser.add_argument("model", type=Path)
    parser.add_argument("extra", type=Path)
    parser.add_argument("adapters", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    options = parser.parse_args()
    name = PEERS[options.peer].distribution
    print(f"\n{json.dumps({'version': f'{name} {version(name)}'})}", flush=True)
    folders = sorted(options.adapters.iterdir(), key=lambda path: int(path.name[1:]))
    options.count = len(folders)
    job = Job(options.model, options.format, options.threads, options.extra, prefix_cache=False)
    measure(LOADERS[options.peer](job, folders), options)
    os._exit(0)  # a library may keep threads that do not end


if __name__ == "__main__":
    main()
