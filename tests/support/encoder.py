"""A BERT with random weights, written quickly and without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import processors

from tests.support.scripted import write_checkpoint

Shape = tuple[int, ...]
VOCAB, SIZE, INNER, POSITIONS = 263, 32, 48, 64
BEGIN, END = 257, 258


def write_bert(folder: Path, *, labels: int = 0) -> Path:
    """Write a BERT with random weights, and a tokenizer in which every byte is a token."""
    write_checkpoint(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", BEGIN), ("<|im_end|>", END)],
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["BertForSequenceClassification" if labels else "BertModel"],
        "model_type": "bert",
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "num_labels": labels or None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(4)
    save_file({n: _values(rng, n, s) for n, s in _shapes(labels)}, folder / "model.safetensors")
    return folder


def _values(rng: np.random.Generator, name: str, shape: Shape) -> np.ndarray:
    start = 1.0 if "LayerNorm.weight" in name else 0.0
    return (start + rng.normal(0, 0.3, shape)).astype(np.float32)


def _shapes(labels: int) -> Iterator[tuple[str, Shape]]:
    tables = {"word": VOCAB, "position": POSITIONS, "token_type": 2}
    yield from ((f"embeddings.{n}_embeddings.weight", (rows, SIZE)) for n, rows in tables.items())
    yield from _norm("embeddings.LayerNorm")
    for layer in (f"encoder.layer.{i}." for i in range(2)):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            yield from _linear(f"{layer}attention.{part}", SIZE, SIZE)
        yield from _norm(f"{layer}attention.output.LayerNorm")
        yield from _linear(f"{layer}intermediate.dense", INNER, SIZE)
        yield from _linear(f"{layer}output.dense", SIZE, INNER)
        yield from _norm(f"{layer}output.LayerNorm")
    if labels:
        yield from _linear("pooler.dense", SIZE, SIZE)
        yield from _linear("classifier", labels, SIZE)


def _linear(name: str, rows: int, cols: int) -> tuple[tuple[str, Shape], ...]:
    return (f"{name}.weight", (rows, cols)), (f"{name}.bias", (rows,))


def _norm(name: str) -> tuple[tuple[str, Shape], ...]:
    return (f"{name}.weight", (SIZE,)), (f"{name}.bias", (SIZE,))
