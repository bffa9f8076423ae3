"""What a classifier's numbers mean: names of labels, and how they become probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.utils.json_files import read_json


@dataclass(frozen=True, slots=True)
class Labels:
    """Read from config.json.

    Attributes:
        names: By index; those that are missing are called `LABEL_i`.
        independent: Several labels may be true of one text.
        plain: A single number is the score itself, not the logit of a probability.
    """

    names: dict[int, str] = field(default_factory=dict[int, str])
    independent: bool = False
    plain: bool = False

    def name(self, index: int) -> str:
        """What a label is called."""
        return self.names.get(index, f"LABEL_{index}")

    def probabilities(self, values: np.ndarray) -> np.ndarray:
        """Of each label: together 1, or each by itself."""
        wide = values.astype(np.float64)
        if len(wide) == 1 or self.independent:
            return 1.0 / (1.0 + np.exp(-wide))
        powers = np.exp(wide - wide.max())
        return powers / powers.sum()

    def relevance(self, values: np.ndarray) -> float | None:
        """How well two texts fit, of a model with one label or two; None for more."""
        if len(values) > 2:
            return None
        if len(values) == 1 and self.plain:
            return float(values[0])
        return float(self.probabilities(values)[-1])


def read_labels(model_path: str) -> Labels:
    """Labels of a checkpoint; defaults where its config.json says nothing or is not there."""
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
    """Sentence-transformers names what it does to the number; a sigmoid unless it says so."""
    nested = raw.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, dict) else None
    named = named or raw.get("sbert_ce_default_activation_function") or ""
    reward = str(next(iter(raw.get("architectures") or ()), "")).endswith("RewardModel")
    return reward or str(named).endswith("Identity")
