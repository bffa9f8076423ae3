"""Prompts of the built-in model's kinds, for `sylvan train-draft sapling FILE`.

python -m tools.train.draft_prompts FILE [--count 20000] [--seed 77]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.train.data.base import Example
from tools.train.data.mix import CLASSES, draw


def prompts(seed: int, count: int, kinds: Sequence[str] = CLASSES) -> Iterator[dict[str, Any]]:
    """Requests of these kinds in turn, in the shape of the chat API, nearly all different."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        example = draw(kinds[len(seen) % len(kinds)], rng, "train")
        prompt = _prompt(example)
        key = json.dumps(prompt, sort_keys=True)
        if key not in seen or rng.random() < 0.05:  # some classes have few different ones
            seen.add(key if key not in seen else f"{key} {len(seen)}")
            yield prompt


def _prompt(example: Example) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": example.messages[:-1]}
    if example.tools:
        prompt["tools"] = example.tools
    if example.thinking:
        prompt["chat_template_kwargs"] = {"enable_thinking": True}
    return prompt


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=77)
    chosen = parser.parse_args()
    with chosen.file.open("w", encoding="utf-8") as opened:
        for prompt in prompts(chosen.seed, chosen.count):
            opened.write(json.dumps(prompt, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
