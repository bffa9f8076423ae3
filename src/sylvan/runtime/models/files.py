"""Opens the weights of a model directory in any supported format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from sylvan.checkpoints.formats import PICKLED, WeightFormat, weight_format
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.gguf import GGUFWeights
from sylvan.runtime.models.pickled import PickledWeights
from sylvan.runtime.models.safetensors import Checkpoint
from sylvan.runtime.models.stored import WeightFiles

LoadFormat = Literal["auto", "safetensors", "pt", "gguf"]

_READERS: Mapping[WeightFormat, Callable[[Path], WeightFiles]] = {
    "safetensors": Checkpoint,
    "pt": PickledWeights,
    "gguf": GGUFWeights,
}


def open_weights(model_dir: Path, load_format: LoadFormat = "auto") -> WeightFiles:
    """Open the weights of `model_dir`; `auto` takes any format except pickles.

    Raises:
        ConfigError: there are none in that format, or they are unreadable.
    """
    if load_format != "auto":
        return _READERS[load_format](model_dir)
    found = weight_format(model_dir)
    if found == "pt":
        raise ConfigError(f"{str(model_dir)!r} {PICKLED}")
    return _READERS[found or "safetensors"](model_dir)
