"""The labels of a classifier, and how its logits become probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.utils.json_files import read_json


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels as read from config.json.

    Attributes:
        names: By index; missing ones are called `LABEL_i`.
        independent: Several labels may apply to one text.
        plain: A single number is the score itself instead of a logit.
    """

    names: dict[int, str] = field(default_factory=dict[int, str])
    independent: bool = False
    plain: bool = False

    def name(self, index: int) -> str:
        """Return the name of a label."""
        return self.names.get(index, f"LABEL_{index}")

    def probabilities(self, values: np.ndarray) -> np.ndarray:
        """Return the label probabilities: softmax, or independent sigmoids."""
        wide = values.astype(np.float64)
        if len(wide) == 1 or self.independent:
            return 1.0 / (1.0 + np.exp(-wide))
        powers = np.exp(wide - wide.max())
        return powers / powers.sum()

    def relevance(self, values: np.ndarray) -> float | None:
        """Return the relevance of a pair, for models with one or two labels; None for more."""
        if len(values) > 2:
            return None
        if len(values) == 1 and self.plain:
            return float(values[0])
        return float(self.probabilities(values)[-1])


def read_labels(model_path: str) -> Labels:
    """Read a checkpoint's labels; defaults if its config.json is silent or missing."""
    try:
        raw = read_json(Path(model_path) / "config.json")
    except (OSError, ValueError):
        return Labels()
    if not isinstance(raw, dict):
        return Labels()
    return Labels(
        names=_names(raw.get("id2label")),
        independent=raw.get("problem_type") == "multi_label_classification",
        plain=_is_plain(raw),
    )


def _names(found: Any) -> dict[int, str]:
    if not isinstance(found, dict):
        return {}
    return {int(key): str(name) for key, name in found.items() if str(key).isdigit()}


def _is_plain(raw: dict[str, Any]) -> bool:
    """Whether the checkpoint names the identity as activation; the default is a sigmoid."""
    nested = raw.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, dict) else None
    named = named or raw.get("sbert_ce_default_activation_function") or ""
    reward = str(next(iter(raw.get("architectures") or ()), "")).endswith("RewardModel")
    return reward or str(named).endswith("Identity")
