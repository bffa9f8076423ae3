"""`options` of Ollama's bodies."""

from __future__ import annotations

from collections.abc import Iterable

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
"""Ollama's names of sampling parameters to ours."""

_HARMLESS = frozenset({
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "low_vram", "numa",
    "use_mmap", "use_mlock", "repeat_last_n", "tfs_z", "typical_p", "mirostat", "mirostat_eta",
    "mirostat_tau", "penalize_newline", "vocab_only", "f16_kv", "logits_all",
})  # fmt: skip
"""Names that have a meaning only where a model is loaded for a call."""


def check_names(options: Iterable[str] | None) -> None:
    """Refuse what nobody knows.

    Raises:
        RequestError: names the first such option.
    """
    for name in options or ():
        if name not in OPTIONS and name not in _HARMLESS and name != "num_predict":
            path = f"options.{name[:80]}"
            raise RequestError(f"{path} is not known.", param=path)
