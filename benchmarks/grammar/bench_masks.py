"""Time to the first mask, and for each mask, by library, over made-up but realistic schemas.

    python benchmarks/grammar/bench_masks.py MODEL_DIR [--schemas 500]

Run it on a quiet machine. Outputs are random walks through the masks.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar import backends
from sylvan.runtime.features.grammar.libraries import installed_backends, library_version
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.text import vocabulary_of
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils import plugins

NOUNS = ["user", "order", "item", "price", "city", "code", "status", "tag", "owner", "total"]
TOKENS_PER_OUTPUT = 40


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Records of strings, numbers, enumerations, lists and records, as APIs have them."""
    kinds = ["string", "integer", "number", "boolean", "enum", "array", "object"]
    match rng.choice(kinds if depth < 3 else kinds[:5]) if depth else "object":
        case "enum":
            return {"enum": rng.sample(NOUNS, rng.randrange(2, 6))}
        case "array":
            return {"type": "array", "items": schema(rng, depth + 1), "maxItems": 5}
        case "object":
            names = rng.sample(NOUNS, rng.randrange(2, 9))
            return {
                "type": "object",
                "properties": {f"{n}_{rng.randrange(9)}": schema(rng, depth + 1) for n in names},
                "additionalProperties": False,
            } | {"required": []}
        case kind:
            return {"type": kind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--schemas", type=int, default=500)
    options = parser.parse_args()
    words = vocabulary_of(Tokenizer.load(options.model), 0)
    row = np.zeros(words.words, np.int32)
    for name in installed_backends():
        backend = plugins.load(backends, name).BACKEND(words)
        firsts, masks, refused = [], [], 0
        for seed in range(options.schemas):
            rng = random.Random(seed)
            made = schema(rng)
            made["required"] = list(made["properties"])
            spec = GrammarSpec("json_schema", json.dumps(made))
            start = time.perf_counter()
            try:
                matcher = backend.compile(spec).matcher()
            except RequestError:
                refused += 1
                continue
            matcher.fill_mask(row)
            firsts.append(time.perf_counter() - start)
            for _ in range(TOKENS_PER_OUTPUT):
                start = time.perf_counter()
                matcher.fill_mask(row)
                masks.append(time.perf_counter() - start)
                bits = np.unpackbits(row.view(np.uint8), bitorder="little", count=words.size)
                ids = [i for i in np.flatnonzero(bits).tolist() if i not in words.eos_ids]
                if not ids or not matcher.accept(rng.choice(ids)):
                    break
        report = {"library": library_version(name), "refused": refused}
        for label, values in (("first_mask_ms", firsts), ("mask_us", masks)):
            scale = 1e3 if label.endswith("ms") else 1e6
            p50, p99 = np.percentile(values, [50, 99]) * scale
            report[label] = {"p50": round(p50, 3), "p99": round(p99, 3)}
        print(json.dumps(report))


if __name__ == "__main__":
    main()
