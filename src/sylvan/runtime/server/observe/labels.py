"""Metric labels: the model's, the operator's, and those that clients may set.

Clients choose label values; the number of distinct values is bounded, because each one creates time
series that are never removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from sylvan.protocol.errors import ConfigError

MAX_VALUES = 100
OTHER = "other"
_MAX_CHARS = 128
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = frozenset(
    {
        *("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank", "le"),
        *("is_streaming", "finish", "stage", "cache_source", "tenant", "kind", "mode"),
    }
)


@dataclass(slots=True)
class BoundedValues:
    """The values of one label, limited in number: the first ones seen, and `other` for the rest.

    Args:
        limit: Number of distinct values.
    """

    limit: int = MAX_VALUES
    _known: set[str] = field(default_factory=set[str])

    def value(self, given: str) -> str:
        """Return the value to count under."""
        given = given[:_MAX_CHARS]
        if given not in self._known:
            if len(self._known) >= self.limit:
                return OTHER
            self._known.add(given)
        return given


class MetricLabels:
    """The labels of all metrics of a model.

    Args:
        base: Names and values of the labels that all metrics have.
        custom: Names of labels that clients may set.

    Raises:
        ConfigError: A name is invalid or taken.
    """

    def __init__(
        self, base: Mapping[str, str], extra: Mapping[str, str], custom: Sequence[str]
    ) -> None:
        for path, names in (("metric_labels", extra), ("custom_labels", custom)):
            for name in names:
                if not _NAME.fullmatch(name) or name.startswith("__") or name in _TAKEN:
                    raise ConfigError(f"observe.{path}: {name!r} cannot be the name of a label")
        if doubles := {*extra} & {*custom}:
            raise ConfigError(f"observe.custom_labels: {min(doubles)} is in metric_labels, too")
        self.base = {**base, **extra}
        self.custom = tuple(custom)
        self._values = {name: BoundedValues() for name in custom}

    @property
    def names(self) -> tuple[str, ...]:
        """Label names of request metrics."""
        return (*self.base, *self.custom)

    def values(self, given: Mapping[str, str]) -> tuple[str, ...]:
        """Return the label values of one request; empty where it sets none."""
        custom = (
            self._values[name].value(given[name]) if name in given else "" for name in self.custom
        )
        return (*self.base.values(), *custom)


def read_labels(header: str | None, allowed: Sequence[str]) -> Mapping[str, str]:
    """Read the allowed custom labels of a call; malformed ones are ignored."""
    if not header or not allowed:
        return {}
    try:
        found = json.loads(header)
    except (ValueError, RecursionError):
        return {}
    return allowed_labels(found, allowed)


def allowed_labels(found: object, allowed: Sequence[str]) -> Mapping[str, str]:
    """Return the fields of an object that are allowed as labels."""
    if not isinstance(found, dict):
        return {}
    given = cast("dict[str, object]", found)
    return {name: _text(given[name]) for name in allowed if name in given}


def _text(given: object) -> str:
    """Return a value without unpaired surrogates, which would make the whole page invalid UTF-8."""
    return str(given)[:_MAX_CHARS].encode("utf-8", "replace").decode()
