"""A tiny model directory for real processes: random weights, every byte a token."""

from __future__ import annotations

import json
from pathlib import Path

from sylvan.config import Config
from sylvan.config.tree import CacheConfig, ObserveConfig, SchedulerConfig
from tests.support.scripted import write_checkpoint

VOCAB = 263
CONTEXT = 16384
ENDLESS = 12_000
"""Tokens that take many seconds: a request for so many is under way, whatever holds a test up."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 258,
}


def write_model(folder: Path) -> Path:
    """Write a Llama of about 30,000 parameters, to be loaded with `load_format: dummy`."""
    write_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def tiny_config(folder: Path, **changes: object) -> Config:
    """Return a configuration that serves it with one thread per process."""
    values: dict[str, object] = {
        "model": str(folder),
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "cache": CacheConfig(page_size=16, max_tokens=65536),
        "scheduler": SchedulerConfig(
            max_batch_tokens=512, max_running_reqs=32, overlap="off", policy="lpm"
        ),
        "observe": ObserveConfig(log_level="warning"),
    }
    return Config(**(values | changes))  # type: ignore[arg-type]
