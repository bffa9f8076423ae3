"""Encoders, embedders and classifiers: tiny checkpoints, and how far they are from transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
import transformers
from transformers import PretrainedConfig

from sylvan.protocol.requests import EmbedRequest
from sylvan.runtime.models.pooling import PoolingOverride
from tests.parity.checkpoints import FAMILIES as BASE
from tests.parity.checkpoints import SHAPE, VOCAB, write
from tests.parity.families import FAMILIES, SLIDING
from tests.parity.serving import Serving

LENGTHS = 40, 3, 17
POOLINGS = "cls", "mean", "last", "max"
LABELS = {"num_labels": 3}
COSINE = 0.9999


def _encoder(name: str, **changes: object) -> Callable[[], PretrainedConfig]:
    shape = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
    return lambda: getattr(transformers, name)(**shape | changes)


def _distil() -> PretrainedConfig:
    sizes = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 112}
    return transformers.DistilBertConfig(
        vocab_size=VOCAB, max_position_embeddings=256, initializer_range=0.15, **sizes
    )


ENCODERS: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        "bert": _encoder("BertConfig"),
        "camembert": _encoder("CamembertConfig", pad_token_id=1),
        "data2vec-text": _encoder("Data2VecTextConfig", pad_token_id=1),
        "distilbert": _distil,
        "electra": _encoder("ElectraConfig", embedding_size=32),
        "ernie": _encoder("ErnieConfig"),
        "gte": _encoder("GteConfig", type_vocab_size=2),
        "modernbert": _encoder(
            "ModernBertConfig", local_attention=12, cls_token_id=1, sep_token_id=2
        ),
        "nomic-bert": _encoder("NomicBertConfig"),
        "roberta": _encoder("RobertaConfig", pad_token_id=1),
        "xlm-roberta": _encoder("XLMRobertaConfig", pad_token_id=1),
    }
)
DECODERS: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {
        **{n: BASE[n] for n in ("llama", "mistral", "qwen2", "qwen3")},
        **{
            n: FAMILIES[n]
            for n in (
                *("arcee", "cohere", "cohere2", "deepseek-v2", "deepseek-v3", "exaone4"),
                *("falcon-7b", "gemma", "gemma2", "gemma3", "glm", "glm4", "gpt2", "gpt-bigcode"),
                *("gpt-neox", "gpt-oss", "gptj", "granite", "helium", "ministral", "mixtral"),
                *("nemotron", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2-moe", "qwen3-moe"),
                *("seed-oss", "smollm3", "stablelm", "starcoder2"),
            )
        },
        "clip-text": _encoder("CLIPTextConfig", projection_dim=32),
        "eurobert": _encoder("EuroBertConfig", num_key_value_heads=2),
        "embeddinggemma": lambda: transformers.Gemma3TextConfig(
            **SHAPE,
            head_dim=24,
            sliding_window=12,
            layer_types=SLIDING,
            use_bidirectional_attention=True,
        ),
    }
)
NO_CLASSIFIER = frozenset(
    {"clip-text", "cohere", "cohere2", "eurobert", "embeddinggemma", "granite"}
)
"""Without one in transformers, or the same one as another of the list."""

EMBEDDERS = {f"{name}-embed": make for name, make in {**ENCODERS, **DECODERS}.items()}
CLASSIFIERS = {
    f"{name}-classify": make
    for name, make in {**ENCODERS, **DECODERS}.items()
    if name not in NO_CLASSIFIER
}
VECTORS = {**EMBEDDERS, **CLASSIFIERS}


@dataclass
class Difference:
    """`unequal` are the ways of computing whose bits differ from those of the first."""

    largest: float = 0.0
    cosine: float = 1.0
    runner: str = ""
    kv_bytes: int = 0
    unequal: list[str] = field(default_factory=list)


class VectorServing(Serving):
    """`embed` runs requests for vectors to their end."""

    def embed(
        self, prompts: Sequence[Sequence[int]], token_types: np.ndarray | None = None
    ) -> list[np.ndarray]:
        rids = []
        for prompt in prompts:
            self._count += 1
            rids.append(f"r{self._count}")
            ids = np.array(prompt, np.int32)
            types = None if token_types is None else token_types[: len(ids)]
            self.scheduler.add(EmbedRequest(rid=rids[-1], input_ids=ids, token_types=types))
        self.run()
        found = [self.outputs[rid][-1] for rid in rids]
        assert not [out.finish for out in found if out.finish.type == "abort"]
        return [out.embedding for out in found]


def serve(path: Path, pooling: str | None = None, **limits: object) -> VectorServing:
    """A checkpoint served for vectors."""
    options = {"embed": PoolingOverride(mode=pooling), "headless": True} | limits.pop("options", {})
    both = (path / "bidirectional").exists()
    whole = {"chunk_tokens": 512, "whole_prompts": True} if both else {}
    runner = str(limits.pop("runner", "auto"))
    return VectorServing(path, runner=runner, options=options, **limits | whole)


def make(name: str, path: Path) -> torch.nn.Module:
    """Write a checkpoint, and read it back as transformers does."""
    config = VECTORS[name]()
    kind = name.rpartition("-")[2]
    for key, value in (LABELS if kind == "classify" else {}).items():
        setattr(config, key, value)
    auto = {
        "embed": transformers.AutoModel,
        "classify": transformers.AutoModelForSequenceClassification,
    }[kind]
    write(config, len(name), path, auto=auto)
    if bidirectional(name):
        (path / "bidirectional").touch()
    return auto.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def bidirectional(name: str) -> bool:
    """Whether attention is not causal."""
    return name.rpartition("-")[0] in {*ENCODERS, "eurobert", "embeddinggemma"}


def compare_vectors(
    name: str, path: Path, serve: Callable[..., VectorServing] = serve
) -> Difference:
    """Every pooling (or the labels), together, alone, again and in chunks.

    `serve` may put the model on another device.
    """
    model = make(name, path)
    rng = np.random.default_rng(11)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in LENGTHS]
    types = rng.integers(0, 2, max(LENGTHS)).astype(np.int32) if _has_types(path) else None
    found = Difference()
    labels = name.endswith("-classify")
    for pooling in (None,) if labels else POOLINGS:
        expected = [_expected(model, prompt, types, pooling) for prompt in prompts]
        serving = serve(path, pooling)
        found.runner, found.kv_bytes = serving.facts.runner, serving.facts.kv_bytes_per_token
        ways = {"together": serving.embed(prompts, types), "again": serving.embed(prompts, types)}
        for mine, theirs in zip(ways["together"], expected, strict=True):
            found.largest = max(found.largest, float(np.abs(mine - theirs).max()))
            cosine = float(mine @ theirs) / float(np.linalg.norm(mine) * np.linalg.norm(theirs))
            found.cosine = min(found.cosine, cosine)
        if not bidirectional(name):
            chunked = serve(path, pooling, chunk_tokens=16, max_batch_tokens=19)
            ways["chunked"] = chunked.embed(prompts, types)
        ways["alone"] = [serve(path, pooling).embed([p], types)[0] for p in prompts[:1]]
        _compare_ways(found, pooling or "", ways)
    return found


def _compare_ways(found: Difference, pooling: str, ways: dict[str, list[np.ndarray]]) -> None:
    """Recorded programs give the same bits; PyTorch's matrices may round otherwise in a batch."""
    exact = found.runner.startswith("program")
    for way, vectors in ways.items():
        for mine, first in zip(vectors, ways["together"], strict=False):
            near = np.allclose(mine, first, rtol=0, atol=1e-5)
            if not (np.array_equal(mine, first) if exact else near):
                found.unequal.append(f"{pooling} {way}")


def _has_types(path: Path) -> bool:
    raw = json.loads((path / "config.json").read_text())
    return raw.get("type_vocab_size", 0) > 1 and raw["model_type"] not in ("roberta", "xlm-roberta")


def _expected(
    model: torch.nn.Module, ids: list[int], types: np.ndarray | None, pooling: str | None
) -> np.ndarray:
    inputs = {"input_ids": torch.tensor([ids])}
    if types is not None:
        inputs["token_type_ids"] = torch.from_numpy(types[: len(ids)]).long()[None]
    with torch.inference_mode():
        out = model(**inputs)
    if pooling is None:
        return out.logits[0].numpy()
    hidden = out.last_hidden_state[0].double().numpy()
    pooled = {
        "cls": hidden[0],
        "mean": hidden.mean(0),
        "last": hidden[-1],
        "max": hidden.max(0),
    }[pooling]
    return (pooled / np.linalg.norm(pooled)).astype(np.float32)
