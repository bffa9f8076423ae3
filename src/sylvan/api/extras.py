"""Fields outside a body's type: harmless, rejected, or unknown."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any, cast, get_args

from sylvan.api.validation import WireModel
from sylvan.protocol.errors import RequestError

MAX_NAMED = 16

_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})

READ_ELSEWHERE = frozenset({"custom_labels", "external_trace_header"})
"""Fields that every route accepts: see `sylvan.runtime.server.observe.origin`."""

NO_EFFECT = frozenset({
    "conversation_id", "keep_alive", "kv_hints", "log_metrics", "metadata", "modalities", "no_logs",
    "prompt_cache_key", "prompt_cache_retention", "received_time",
    "return_flat_raw_top_logprobs_b64", "routed_experts_start_len", "routing_key",
    "safety_identifier", "sampling_logprobs_mode", "service_tier", "session_id", "store", "user",
    "verbosity",
})  # fmt: skip
"""Fields that clients commonly send and that have no effect here: they are reported like unknown
ones."""

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("image_data", "video_data", "audio_data"),
        "put images, videos and sounds into the content of messages, or call /generate",
    ),
    **dict.fromkeys(
        (
            "mm_hashes", "mm_content_hashes",
            "use_audio_in_video", "video_config", "images_config", "mm_processor_kwargs",
            "max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch",
            "video_max_dynamic_patch", "images", "audio",
        ),
        "this server prepares images by the checkpoint's settings",
    ),
    **dict.fromkeys(
        (
            "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key",
            "decode_tp_size", "disagg_prefill_dp_rank",
        ),
        "this server does not split prefill from decode",
    ),
    **dict.fromkeys(
        (
            "input_embeds", "positional_embed_overrides", "embed_overrides",
            "embed_override_token_id", "query_embed_overrides", "item_embed_overrides",
            "multi_item_delimiter_indices", "token_indices_to_pool",
            "return_hidden_states", "return_routed_experts", "return_indexer_topk",
            "return_sampling_mask", "return_entropy", "return_bytes",
            "return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs",
            "return_spec_tokens_details", "return_pooled_hidden_states", "watermark",
            "score_extraction_token", "task", "web_search_options",
            "prediction", "functions", "function_call",
        ),
        "this server does not support it",
    ),
    "custom_logit_processor": "this server runs no code of clients",
    "lora_id": "name the adapter with lora_path",
    "session_params": "sessions are for /generate",
}  # fmt: skip
"""Known fields that are rejected unless their value changes nothing, and why."""


_RANKS = ("routed_dp_rank", "data_parallel_rank")


def check_rank(name: str, value: Any) -> None:
    """Check that a request addresses the only replica.

    Raises:
        RequestError: It names another one, or an impossible one.
    """
    ranks = value if isinstance(value, list) else [value]
    if any(rank is not None and (type(rank) is not int or rank != 0) for rank in ranks):
        raise RequestError(f"{name}: this server has one replica, of rank 0.", param=name)


BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Known fields of prefill-decode disaggregation that only some bodies have."""


def unknown_fields(body: WireModel, also_known: Collection[str] = ()) -> list[str]:
    """Return the paths of fields without effect, at any depth, to report them in the answer.

    Args:
        body: The parsed body.
        also_known: Top-level fields that are read elsewhere.

    Raises:
        RequestError: A field is known, but not supported.
    """
    unknown: list[str] = []
    for name, value in (body.model_extra or {}).items():
        if name in READ_ELSEWHERE or name in also_known:
            continue
        if name in _RANKS:
            check_rank(name, value)
        elif (reason := REFUSED.get(name)) is None:
            if name not in NO_EFFECT or not _is_neutral(value):
                unknown.append(name)
        elif not _is_neutral(value):
            raise RequestError(f"{name} is not supported: {reason}.", param=name)
    _look_inside(body, "", unknown)
    return unknown


def _is_neutral(value: Any) -> bool:
    """Whether a value changes nothing."""
    return any(value is n or (value == n and type(value) is type(n)) for n in _NEUTRAL)


def _look_inside(body: WireModel, path: str, found: list[str]) -> None:
    """Collect the fields without effect of a body, and of the objects inside it."""
    kind = type(body)
    given, values = body.model_fields_set, body.__dict__
    if kind.without_effect is not WireModel.without_effect:
        found.extend(
            path + (kind.model_fields[name].alias or name)
            for name in body.without_effect
            if name in given and not _is_neutral(values[name])
        )
    for name in _holders(kind):
        value = values.get(name)
        if value is None or name not in given:
            continue
        if isinstance(value, WireModel):
            _look_at(value, f"{path}{name}", found)
        elif isinstance(value, list):
            for i, item in enumerate(cast("list[Any]", value)):
                if isinstance(item, WireModel):
                    _look_at(item, f"{path}{name}[{i}]", found)


def _look_at(value: WireModel, path: str, found: list[str]) -> None:
    extra = value.model_extra
    if extra and not value.passes_on:
        found.extend(f"{path}.{name}" for name in extra)
    _look_inside(value, f"{path}.", found)


@functools.cache
def _holders(kind: type[WireModel]) -> tuple[str, ...]:
    """Return the fields of a type that can hold other objects, or lists of them, sorted."""
    return tuple(
        sorted(name for name, field in kind.model_fields.items() if _holds(field.annotation))
    )


def _holds(annotation: Any) -> bool:
    """Whether values of a type may be or contain a `WireModel`."""
    if isinstance(annotation, type) and issubclass(annotation, WireModel):
        return True
    return annotation is Any or any(map(_holds, get_args(annotation)))
