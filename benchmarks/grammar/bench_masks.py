"""Measures the time to the first token mask, and per mask, by library, for realistic random
schemas.

    python benchmarks/grammar/bench_masks.py [MODEL_DIR] [--schemas 500] [--seconds 50]
        [--backend llguidance ...] [--vocab 151936]

Run it on a quiet machine. Outputs are random walks through the masks. Each library gets
`--seconds`; the number of schemas that it completed is reported.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from shapes import SAPLING, progress

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.api import GrammarBackend, GrammarMatcher
from sylvan.runtime.features.grammar.libraries import (
    installed_backends,
    library_version,
    make_backend,
)
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.text import vocabulary_of
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.text.tokenizer import Tokenizer

NOUNS = ["user", "order", "item", "price", "city", "code", "status", "tag", "owner", "total"]
TOKENS_PER_OUTPUT = 40


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of strings, numbers, enumerations, lists and records, as in typical APIs."""
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


class Walks:
    """Measurements of one library."""

    def __init__(self, backend: GrammarBackend, words: Vocabulary) -> None:
        self._backend, self._words = backend, words
        self._row = np.zeros(words.words, np.int32)
        self.firsts: list[float] = []
        self.masks: list[float] = []
        self.refused = 0

    def take(self, seed: int) -> None:
        """Compile one schema, and generate one output of it."""
        rng = random.Random(seed)
        made = schema(rng)
        made["required"] = list(made["properties"])
        spec = GrammarSpec("json_schema", json.dumps(made))
        start = time.perf_counter()
        try:
            matcher = self._backend.compile(spec).matcher()
        except RequestError:
            self.refused += 1
            return
        matcher.fill_mask(self._row)
        self.firsts.append(time.perf_counter() - start)
        self._walk(matcher, rng)

    def _walk(self, matcher: GrammarMatcher, rng: random.Random) -> None:
        words = self._words
        for _ in range(TOKENS_PER_OUTPUT):
            start = time.perf_counter()
            matcher.fill_mask(self._row)
            self.masks.append(time.perf_counter() - start)
            bits = np.unpackbits(self._row.view(np.uint8), bitorder="little", count=words.size)
            bits[list(words.eos_ids)] = 0
            ids = np.flatnonzero(bits)
            if not len(ids) or not matcher.accept(int(rng.choice(ids))):
                return


def measure(name: str, words: Vocabulary, schemas: int, seconds: float) -> dict[str, Any]:
    walks = Walks(make_backend(name, words), words)
    until = time.perf_counter() + seconds
    for seed in range(schemas):
        if time.perf_counter() > until:
            break
        walks.take(seed)
    report: dict[str, Any] = {
        "library": library_version(name),
        "schemas": len(walks.firsts),
        "refused": walks.refused,
    }
    for label, values, scale in (
        ("first_mask_ms", walks.firsts, 1e3),
        ("mask_us", walks.masks, 1e6),
    ):
        p50, p99 = np.percentile(values, [50, 99]) * scale if values else (np.nan, np.nan)
        report[label] = {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=SAPLING)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--backend", nargs="+", default=installed_backends())
    parser.add_argument("--vocab", type=int, default=0, help="vocabulary size; 0: the tokenizer's")
    parser.add_argument("--seconds", type=float, default=50.0)
    options = parser.parse_args()
    words = vocabulary_of(Tokenizer.load(options.model), options.vocab)
    for name in options.backend:
        progress(f"{name}: at most {options.seconds:g} s")
        print(json.dumps(measure(name, words, options.schemas, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
