"""Builds `ServedModelInfo`, the API process's information about the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, get_args

from sylvan.config import Config
from sylvan.protocol.requests import VectorForm
from sylvan.runtime.engine.engine_core import Scalar
from sylvan.runtime.tokenizer.types import ServedModelInfo, Task
from sylvan.text.tokenizer import Tokenizer


def served_model_info(
    config: Config, facts: Mapping[str, Scalar], tokenizer: Tokenizer, path: str
) -> ServedModelInfo:
    """Build it from the scheduler's report."""
    known: dict[str, Scalar] = dict(facts)

    def number(name: str, default: int) -> int:
        value: Scalar = known.pop(name, None)
        return int(value) if value else default

    return ServedModelInfo(
        model_path=path,
        served_name=config.served_model_name or config.model.rstrip("/").rpartition("/")[2],
        context_len=number("context_len", 1),
        vocab_size=number("vocab_size", tokenizer.vocab_size),
        eos_ids=tokenizer.eos_ids,
        max_total_tokens=number("max_total_tokens", 0),
        page_size=number("page_size", 1),
        max_running_reqs=number("max_running_reqs", 0),
        architecture=str(known.pop("architecture", None) or tokenizer.files.architecture),
        model_type=str(known.pop("model_type", None) or tokenizer.files.model_type),
        task=cast("Task", known.pop("task", None) or "generate"),
        vector_size=number("vector_size", 0),
        forms=_forms(known.pop("forms", None)),
        decoder_prompt=_ids(known.pop("decoder_prompt", None)),
        encoder_len=number("encoder_len", 0),
        padded_len=number("padded_len", 0),
        extra=known,
    )


def _forms(reported: Scalar) -> tuple[VectorForm, ...]:
    """Forms of a text's embedding; the default if the scheduler reports none: `text`."""
    named = str(reported or "").split(",")
    return tuple(form for form in get_args(VectorForm) if form in named) or ("text",)


def _ids(reported: Scalar) -> tuple[int, ...]:
    return tuple(map(int, str(reported).split(","))) if reported else ()
