"""Converts clients' sampling parameters to `protocol.sampling`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from sylvan.api.validation import json_type, parse_struct, unknown_name
from sylvan.protocol.errors import RequestError
from sylvan.protocol.sampling import GRAMMARS, MAX_LOGIT_BIAS, SamplingParams, fault_of
from sylvan.utils import strict_json

ANY_JSON = "$$ANY$$"
OBJECT_SCHEMA = '{"type": "object"}'

_FIELDS = frozenset(SamplingParams.__struct_fields__)
_AS_HERE: Mapping[str, str] = {}
_SCALARS = (int, float, bool, type(None))
_REMEMBERED = 256
_LISTED = ("stop", "stop_regex")
_UNSUPPORTED = {
    "beam_width": (None, 1),
    "watermark": (None, {}),
}
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """Default sampling parameters.

    Attributes:
        preferred: The operator's, for all routes.
        model: From the checkpoint's `generation_config.json`, for all but the native routes.
    """

    preferred: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `generation_config.json` that are sampling defaults."""
    found: dict[str, Any] = {
        name: value
        for name in _MODEL_DEFAULTS
        if isinstance(value := generation_config.get(name), int | float)
        and not isinstance(value, bool)
    }
    if found.get("top_k") == 0:
        found["top_k"] = -1
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    if banned := _never(generation_config.get("bad_words_ids")):
        found["logit_bias"] = banned
    return found


def _never(given: object) -> dict[str, float]:
    """Biases for tokens that a checkpoint never generates (Marian: padding); single tokens only."""
    words = cast("list[object]", given) if isinstance(given, list) else []
    ones = [cast("list[object]", w) for w in words if isinstance(w, list)]
    tokens = [w[0] for w in ones if len(w) == 1 and isinstance(w[0], int)]
    return {str(token): -100.0 for token in tokens[:MAX_LOGIT_BIAS]}


def read_sampling(
    params: Mapping[str, Any],
    defaults: Mapping[str, Any],
    where: str = "sampling_params",
    names: Mapping[str, str] = _AS_HERE,
) -> SamplingParams:
    """Parse the sampling parameters of a request.

    Args:
        params: The client's values; null means "not set".
        defaults: Default values.
        where: Path of `params` in the body, for errors; "" if they are top-level fields.
        names: Paths of fields that have another name in the body.

    Raises:
        RequestError: A name is unknown, or a value is not supported.
    """
    given = {name: value for name, value in params.items() if value is not None}
    place = _Places(where, names)
    _refuse_unsupported(given, params, place)
    for name in given:
        if name not in _FIELDS:
            raise unknown_name(name, _FIELDS, where)
    if "max_new_tokens" in params and params["max_new_tokens"] is None:
        given["max_new_tokens"] = None
    merged = {**{k: v for k, v in defaults.items() if v is not None}, **given}
    if (known := _known(merged)) is not None:
        return known
    for name in _LISTED:
        if isinstance(merged.get(name), str):
            merged[name] = [merged[name]] if merged[name] else []
    if isinstance(ids := merged.get("stop_token_ids"), list):
        merged["stop_token_ids"] = [i for i in ids if i is not None]
    for name in GRAMMARS:
        if name in given and given[name] in ("", [], ()):
            path = place.of(name)
            raise RequestError(f"{path} is empty; leave it out for any text.", param=path)
    sampling: SamplingParams = parse_struct(SamplingParams, merged, where, names)
    _check(sampling, place)
    return sampling


def _known(values: Mapping[str, Any]) -> SamplingParams | None:
    """Return parameters that are numbers only, the same object each time; None: parse them."""
    if not all(value.__class__ in _SCALARS for value in values.values()):
        return None
    try:
        return _of_scalars(tuple(values.items()), tuple(map(type, values.values())))
    except RequestError:  # parsing them names the client's field
        return None


@functools.lru_cache(_REMEMBERED)
def _of_scalars(items: tuple[tuple[str, Any], ...], types: tuple[type, ...]) -> SamplingParams:
    """Parse numbers, booleans and null; clients send the same ones again and again.

    Args:
        items: Names and values.
        types: Types of the values, since 1, 1.0 and True are equal.
    """
    sampling: SamplingParams = parse_struct(SamplingParams, dict(items), "", {})
    _check(sampling, _Places("", {}))
    return sampling


def _refuse_unsupported(given: dict[str, Any], params: Mapping[str, Any], place: _Places) -> None:
    for name, neutral in _UNSUPPORTED.items():
        if name in params and params[name] not in neutral:
            path = place.of(name)
            raise RequestError(f"{path} is not supported by this server.", param=path)
        given.pop(name, None)


def _check(sampling: SamplingParams, place: _Places) -> None:
    """Check what the types cannot express."""
    if (fault := fault_of(sampling)) is not None:
        path = place.of(fault.name) + fault.place
        raise RequestError(f"{path}: {fault.text}.", param=path)
    if sampling.json_schema is not None:
        check_schema(sampling.json_schema, place.of("json_schema"))


def check_schema(text: str, path: str) -> None:
    """Reject a schema that is not JSON; its meaning is checked by the grammar compiler."""
    if text == ANY_JSON:
        return
    try:
        schema = strict_json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not valid JSON: {error}", param=path) from error
    if not isinstance(schema, dict | bool):
        message = f"{path} must be a JSON schema, not {json_type(schema)}."
        raise RequestError(message, param=path)


@dataclass(frozen=True, slots=True)
class _Places:
    """Maps sampling parameters to paths in the body."""

    where: str
    names: Mapping[str, str]

    def of(self, name: str) -> str:
        """Return the path of one of them."""
        return self.names.get(name) or (f"{self.where}.{name}" if self.where else name)
