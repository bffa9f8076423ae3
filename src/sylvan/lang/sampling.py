"""Sampling parameters of a `gen`: those of the runtime's protocol, as the program gave them.

`sylvan.protocol.sampling.SamplingParams` defines names, types and ranges. The language adds only
the log probabilities to return, and a data type. Values travel as one mapping from `gen` and `run`
to the backend, so that none is dropped on the way.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import msgspec

from sylvan.lang import ir
from sylvan.protocol.errors import RequestError
from sylvan.protocol.sampling import SamplingParams

LOGPROB_OPTIONS = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
)
SAMPLING_NAMES = SamplingParams.__struct_fields__
NAMES = frozenset((*SAMPLING_NAMES, *LOGPROB_OPTIONS, "dtype"))

# Names used by `run` and `run_batch`; all others are arguments of the program.
RUN_NAMES = (
    "max_new_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    *LOGPROB_OPTIONS,
)

# SGLang's client sends these with every `gen`, with their defaults.
_SENT: Mapping[str, Any] = MappingProxyType({
    "max_new_tokens": 128,
    "min_new_tokens": 0,
    "n": 1,
    "stop": (),
    "stop_token_ids": (),
    "stop_regex": (),
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": False,
    "regex": None,
    "json_schema": None,
})  # fmt: skip
_LISTS = ("stop", "stop_token_ids", "stop_regex", "choice")

_DTYPES: Mapping[Any, str] = MappingProxyType({
    int: "int", "int": "int", float: "float", "float": "float",
    str: "str", "str": "str", "string": "str", bool: "bool", "bool": "bool",
})  # fmt: skip
_DTYPE_REGEX: Mapping[str, str] = MappingProxyType({
    "int": ir.REGEX_INT, "float": ir.REGEX_FLOAT, "bool": ir.REGEX_BOOL, "str": ir.REGEX_STR,
})  # fmt: skip
NUMBER_STOPS = (" ", "\n")


def given(values: Mapping[str, Any], caller: str) -> Mapping[str, Any]:
    """Check names, and return the values that are not None.

    Raises:
        TypeError: a name is not a sampling parameter.
        RequestError: an unknown `dtype`.
    """
    for name in values:
        if name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")
    kept = {name: value for name, value in values.items() if value is not None}
    if "dtype" in kept:
        dtype = kept["dtype"]
        known = _DTYPES.get(dtype) if isinstance(dtype, type | str) else None
        if known is None:
            raise RequestError(
                f"dtype must be int, float, str or bool, not {dtype!r}", param="dtype"
            )
        kept["dtype"] = known
    return MappingProxyType(kept)


def as_list(value: Any) -> list[Any]:
    """Convert a scalar or sequence to a list; None to an empty one."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


@dataclass(frozen=True, slots=True)
class GenParams:
    """The parameters of one generation. Every name of `SamplingParams` is an attribute."""

    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __getattr__(self, name: str) -> Any:
        """The effective value: as given, else SGLang's default, else the protocol's."""
        if name in self.values:
            return self.values[name]
        if name in _SENT:
            return _SENT[name]
        if name in SAMPLING_NAMES:
            return getattr(_PROTOCOL_DEFAULTS, name)
        if name in NAMES:
            return None
        raise AttributeError(name)

    def override(self, values: Mapping[str, Any], template_stops: tuple[str, ...]) -> GenParams:
        """Override with the values of a `gen`, and add the chat template's stops.

        Raises:
            RequestError: a value is out of range; names the parameter.
        """
        merged = {**self.values, **values}
        if template_stops:
            merged["stop"] = [*as_list(merged.get("stop")), *template_stops]
        result = GenParams(MappingProxyType(merged))
        result.to_protocol()
        return result

    def with_values(self, **values: Any) -> GenParams:
        """Replace some values without checks."""
        return replace(self, values=MappingProxyType({**self.values, **values}))

    def typed(self) -> GenParams:
        """These parameters with `dtype` turned into a regular expression and stop strings."""
        dtype = self.values.get("dtype")
        if dtype is None:
            return self
        values: dict[str, Any] = {"regex": _DTYPE_REGEX[dtype], "dtype": None}
        if dtype in ("int", "float"):
            values["stop"] = [*as_list(self.stop), *NUMBER_STOPS]
        return self.with_values(**values)

    def to_protocol(self) -> SamplingParams:
        """The runtime's sampling parameters.

        Raises:
            RequestError: a value is of the wrong type or out of range; names the parameter.
        """
        values = {
            name: as_list(value) if name in _LISTS else value
            for name, value in self.values.items()
            if name in SAMPLING_NAMES and value is not None
        }
        try:
            return msgspec.convert(values, SamplingParams)
        except msgspec.ValidationError as error:
            text, _, path = str(error).partition(" - at `$.")
            name = path.rstrip("`").split("[")[0]
            raise RequestError(f"{name or 'sampling'}: {text}", param=name or None) from error

    def to_wire(self) -> dict[str, Any]:
        """The `sampling_params` object of a `/generate` request, as SGLang's client sends it."""
        typed = self.typed()
        wire = {name: typed.values.get(name, default) for name, default in _SENT.items()}
        extra = {k: v for k, v in typed.values.items() if k in SAMPLING_NAMES and v is not None}
        return {**wire, **extra}

    def logprob_options(self) -> dict[str, Any]:
        """The fields outside of `sampling_params` that were given."""
        return {k: self.values[k] for k in LOGPROB_OPTIONS if self.values.get(k) is not None}


_PROTOCOL_DEFAULTS = SamplingParams()


def run_defaults(options: Mapping[str, Any]) -> GenParams:
    """Defaults of a program's `gen` calls, from the arguments of `run`.

    Raises:
        RequestError: a value is of the wrong type or out of range; names the parameter.
    """
    result = GenParams(given(options, "run"))
    result.to_protocol()
    return result
