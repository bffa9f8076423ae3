"""Draft heads in their published formats, and a reference of their computation.

Shapes: T positions, D columns.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.support.random_model import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB

EPS, BASE = 1e-5, 10000.0


def write_head(
    folder: Path,
    kind: str,
    *,
    drafted: int = VOCAB,
    embedding: bool = True,
    prefix: str = "midlayer.",
    model: Path | None = None,
    seed: int = 11,
    changes: dict[str, np.ndarray | None] | None = None,
    **config: object,
) -> Path:
    """Write a head with random weights, by default for the model of `random_model`.

    Args:
        folder: Target directory; created if needed.
        kind: `eagle` or `eagle3`.
        drafted: Tokens that it can draft.
        embedding: Whether it has an embedding of its own.
        prefix: Prefix of the layer's tensor names.
        model: Model to use instead.
        seed: Seed of the weights.
        changes: Tensors that replace the random ones; None: leave the tensor out.
        config: Content of config.json to use instead.
    """
    folder.mkdir(parents=True, exist_ok=True)
    third = kind == "eagle3"
    sizes = json.loads((model / "config.json").read_text()) if model else {}
    about = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": drafted,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "rms_norm_eps": EPS,
        "rope_theta": BASE,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    about |= {name: sizes[name] for name in about if name in sizes and name != "architectures"}
    about["num_hidden_layers"] = 1
    vocab, dim, inner = (about[name] for name in ("vocab_size", "hidden_size", "intermediate_size"))
    heads, kv_heads, head_dim = (
        about[f"{name}"] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    (folder / "config.json").write_text(json.dumps(about | config))
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    def scales() -> np.ndarray:
        return rng.uniform(0.5, 1.5, dim).astype(np.float32)

    inputs = 2 * dim if third else dim
    weights = {
        f"{prefix}self_attn.q_proj.weight": matrix(heads * head_dim, inputs),
        f"{prefix}self_attn.k_proj.weight": matrix(kv_heads * head_dim, inputs),
        f"{prefix}self_attn.v_proj.weight": matrix(kv_heads * head_dim, inputs),
        f"{prefix}self_attn.o_proj.weight": matrix(dim, heads * head_dim),
        f"{prefix}mlp.gate_proj.weight": matrix(inner, dim),
        f"{prefix}mlp.up_proj.weight": matrix(inner, dim),
        f"{prefix}mlp.down_proj.weight": matrix(dim, inner),
        f"{prefix}post_attention_layernorm.weight": scales(),
        "fc.weight": matrix(dim, (3 if third else 2) * dim),
    }
    if third:
        weights |= {
            f"{prefix}hidden_norm.weight": scales(),
            f"{prefix}input_layernorm.weight": scales(),
            "norm.weight": scales(),
            "lm_head.weight": matrix(drafted, dim),
        }
        if drafted < vocab:
            ids = np.sort(rng.choice(vocab, drafted, replace=False))
            weights["d2t"] = ids - np.arange(drafted)
            weights["t2d"] = np.isin(np.arange(vocab), ids)
    else:
        weights["fc.bias"] = matrix(dim)
    if embedding:
        weights["embed_tokens.weight"] = matrix(vocab, dim)
    weights |= changes or {}
    kept = {name: w for name, w in weights.items() if w is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def expected_draft(
    model_dir: Path, head_dir: Path, tokens: list[int], count: int, window: int | None = None
) -> list[int]:
    """Return the head's greedy drafts after `tokens`.

    Args:
        model_dir: A model of `random_model`.
        head_dir: A head of `write_head`, or None of its kind.
        tokens: Known tokens, newest last.
        count: Number of draft tokens.
        window: Newest positions that the head sees; None: all.
    """
    found: list[int] = []
    for _ in range(count):
        found.append(int(next_logits(model_dir, head_dir, tokens, found, window).argmax()))
    return found


def tree(
    model_dir: Path, head_dir: Path, tokens: list[int], depth: int, width: int, nodes: int
) -> set[tuple[int, ...]]:
    """Return the `nodes` most confident paths of a draft tree (EAGLE-2), each as its tokens."""
    scores: dict[tuple[int, ...], float] = {}
    front: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for path in front:
            logs = next_logits(model_dir, head_dir, tokens, list(path)).log_softmax(0)
            best = logs.topk(width)
            for token, log in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                level[*path, token] = scores.get(path, 0.0) + log
        scores |= level
        front = sorted(level, key=lambda path: -level[path])[:width]
    return set(sorted(scores, key=lambda path: -scores[path])[:nodes])


def next_logits(
    model_dir: Path,
    head_dir: Path,
    tokens: list[int],
    path: list[int],
    window: int | None = None,
) -> Tensor:
    """Return the logits of all ids (V,) after `tokens` and the drafts of `path`."""
    model, head = (_weights(path / "model.safetensors") for path in (model_dir, head_dir))
    outputs_LTD, final_TD = model_outputs(model, tokens[:-1])
    embed = head.get("embed_tokens.weight", model["model.embed_tokens.weight"])
    third = "hidden_norm.weight" in head
    known = list(tokens[1:])
    if third:
        read = [outputs_LTD[layer] for layer in (min(1, LAYERS - 1), LAYERS // 2 - 1, 0)]
        vectors_TD = torch.cat(read, 1) @ head["fc.weight"].T
        lm_head = head["lm_head.weight"]
    else:
        vectors_TD, lm_head = final_TD, model["lm_head.weight"]
    for node in [*path, None]:
        out_TD, next_TD = _head(head, embed[known], vectors_TD, third=third, window=window)
        if node is not None:
            known.append(node)
            vectors_TD = torch.cat([vectors_TD, next_TD[-1:]])
    logits = out_TD[-1] @ lm_head.T
    if "d2t" not in head:
        return logits
    whole = torch.full((len(model["model.embed_tokens.weight"]),), -torch.inf)
    whole[torch.arange(len(logits)) + head["d2t"]] = logits
    return whole


def model_outputs(weights: dict[str, Tensor], tokens: list[int]) -> tuple[list[Tensor], Tensor]:
    """Return the residual stream after each layer, and vectors after the final norm, of a Llama."""
    x_TD = weights["model.embed_tokens.weight"][tokens]
    outputs: list[Tensor] = []
    for layer in range(LAYERS):
        part = {
            name.removeprefix(f"model.layers.{layer}."): w
            for name, w in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x_TD = x_TD + _attention(part, _norm(x_TD, part["input_layernorm.weight"]))
        x_TD = x_TD + _mlp(part, _norm(x_TD, part["post_attention_layernorm.weight"]))
        outputs.append(x_TD)
    return outputs, _norm(x_TD, weights["model.norm.weight"])


def _head(
    head: dict[str, Tensor], embeds_TD: Tensor, vectors_TD: Tensor, *, third: bool, window
) -> tuple[Tensor, Tensor]:
    """Return the input of the vocabulary matrix, and the approximate next vectors."""
    if not third:
        x_TD = torch.cat([embeds_TD, vectors_TD], 1) @ head["fc.weight"].T
        x_TD = x_TD + head.get("fc.bias", torch.zeros(1))
        x_TD = x_TD + _attention(head, x_TD, window)
        x_TD = x_TD + _mlp(head, _norm(x_TD, head["post_attention_layernorm.weight"]))
        return x_TD, x_TD
    embeds_TD = _norm(embeds_TD, head["input_layernorm.weight"])
    both = torch.cat([embeds_TD, _norm(vectors_TD, head["hidden_norm.weight"])], 1)
    x_TD = vectors_TD + _attention(head, both, window)
    x_TD = x_TD + _mlp(head, _norm(x_TD, head["post_attention_layernorm.weight"]))
    return _norm(x_TD, head["norm.weight"]), x_TD


def _weights(path: Path) -> dict[str, Tensor]:
    plain = {}
    for name, array in load_file(path).items():
        short = name.removeprefix("midlayer.").removeprefix("layers.0.")
        plain[short] = torch.from_numpy(array)
    return plain


def _norm(x_TD: Tensor, weight: Tensor) -> Tensor:
    return x_TD * torch.rsqrt(x_TD.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _mlp(weights: dict[str, Tensor], x_TD: Tensor) -> Tensor:
    gate, up, down = (weights[f"mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
    return (F.silu(x_TD @ gate) * (x_TD @ up)) @ down


def _attention(weights: dict[str, Tensor], x_TD: Tensor, window: int | None = None) -> Tensor:
    q, k, v = (
        (x_TD @ weights[f"self_attn.{part}_proj.weight"].T).unflatten(1, (-1, HEAD_DIM))
        for part in "qkv"
    )
    q, k = _turned(q), _turned(k)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    far = torch.arange(len(x_TD))[:, None] - torch.arange(len(x_TD))
    seen = (far >= 0) & (far < (window or len(x_TD) + 1))
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", shares, v)
    return mixed.flatten(1) @ weights["self_attn.o_proj.weight"].T


def _turned(x: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    angles = torch.arange(len(x))[:, None] * BASE ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
