"""Checkpoints of half a billion parameters of other families, and their files for llama.cpp."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "models")]  # for the imports in functions
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "lfm2": ("lfm2", ("short",)),
    "qwen3-next": ("qwen3next", ("experts", "delta")),
    "mamba2": ("mamba2", ("pure_states",)),
    "llama4": ("llama4", ("experts", "llama4")),
    "ministral3": ("mistral3", ("yarn", "temperature")),
}
"""Families of `bench_families.py`, with their names in GGUF and the groups of their metadata."""
_MATRICES = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate"),
    *("ffn_gate", "ffn_up", "ffn_down", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    *("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "in_proj", "out_proj"),
    *("ssm_in", "ssm_out", "ssm_ba", "token_embd", "output"),
)
"""Matrices that are stored in the requested type; other tensors stay float32."""


def write_family(name: str, folder: Path, put_tokenizer: Callable[[Path], None]) -> None:
    """Write a checkpoint in bfloat16 with transformers."""
    from bench_families import write

    part = folder.with_name(folder.name + ".partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write(name, part, tiny=False)
    put_tokenizer(part)
    part.rename(folder)


def family_of(folder: Path) -> str | None:
    """Return the family of a checkpoint, by the name of its folder; None: one of `checkpoints`."""
    return folder.name if folder.name in FAMILIES else None


def write_family_gguf(folder: Path, family: str, kind: str, out: Path) -> None:
    """Write the same weights for llama.cpp, as its own converter does."""
    import transformers
    from bench_families import FAMILIES as CONFIGS

    from tests.support import gguf_families

    config = getattr(transformers, CONFIGS[family][0]).from_pretrained(folder)
    name, groups = FAMILIES[family]
    keys = tuple(getattr(gguf_families, group) for group in groups)
    gguf_families.write_family(folder, out, name, config, keys, dict.fromkeys(_MATRICES, kind))
