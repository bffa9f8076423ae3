"""The `options` field of Ollama's bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sylvan.protocol.errors import RequestError

OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
    "seed": "sampling_seed",
}
"""Maps Ollama's names of sampling parameters to ours."""

_HARMLESS = frozenset({
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "low_vram", "numa",
    "use_mmap", "use_mlock", "repeat_last_n", "tfs_z", "typical_p", "mirostat", "mirostat_eta",
    "mirostat_tau", "penalize_newline", "vocab_only", "f16_kv", "logits_all",
})  # fmt: skip
"""Options that only matter when a model is loaded per call."""


def option_fields() -> dict[str, str]:
    """Where bodies hold what the engine calls sampling parameters."""
    places = {name: f"options.{theirs}" for theirs, name in OPTIONS.items()}
    return places | {f"options.{name}": place for name, place in places.items()}


def check_options(options: Mapping[str, Any] | None) -> list[str]:
    """Reject unknown options, and options without effect that have the wrong type.

    Returns: the paths of options without an effect.

    Raises:
        RequestError: An option is invalid; the message names the first one.
    """
    ignored: list[str] = []
    for name, value in (options or {}).items():
        path = f"options.{name[:80]}"
        if name in _HARMLESS:
            if value is not None and not isinstance(value, int | float):
                message = f"{path}: expected a number, true or false."
                raise RequestError(message, param=path)
            ignored.append(path)
        elif name not in OPTIONS and name != "num_predict":
            raise RequestError(f"{path} is not known.", param=path)
    return ignored
