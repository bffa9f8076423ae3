"""Prepares audio: samples to mel spectrograms, with the checkpoint's feature extractor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.media.container import sound_samples
from sylvan.media.images import UnreadableError
from sylvan.media.messages import PrepareItem

SAMPLES, RAW = "samples", "raw"
"""Options: return samples instead of features; the data is already samples (float32)."""

Features = dict[str, np.ndarray]

_PROCESS = "_process_audio"  # creates features and text; transformers has no public name for it

_VOXTRAL, _WHISPER = "VoxtralProcessor", "WhisperProcessor"


class Sounds:
    """Prepares audio for one checkpoint.

    Args:
        model_dir: Directory of the checkpoint.
        extractor: Feature extractor.
        processor: Processor of all media; writes the placeholder text.
        name: Name of its class.
        defaults: The class's settings of the extractor.
    """

    def __init__(
        self,
        model_dir: Path,
        extractor: Any,
        processor: Any,
        name: str,
        defaults: Mapping[str, Any],
    ) -> None:
        self._extractor, self._processor = extractor, processor
        self._defaults = {**defaults, "return_tensors": "np"}
        self._rate = int(extractor.sampling_rate)
        self._defaults["sampling_rate"] = self._rate
        self._make: Callable[[np.ndarray], tuple[Features, str]] = self._by_processor
        if name == _WHISPER:
            processor.audio_token = "<|startoftranscript|>"
            self._make = self._alone
        if name == _VOXTRAL:
            said = json.loads((model_dir / "config.json").read_text()).get("audio_config") or {}
            width, hidden = said.get("intermediate_size", 5120), said.get("hidden_size", 1280)
            positions = said.get("max_source_positions", 1500)
            self._positions, self._tokens = 2 * positions, positions * hidden // width
            self._make = self._in_windows

    def prepare(self, item: PrepareItem) -> tuple[Features, str]:
        """Return the features of audio, and its text in a prompt.

        Raises:
            UnreadableError: The audio is invalid.
        """
        if item.options.get(RAW):
            samples = np.frombuffer(item.data, np.float32)
        else:
            samples = sound_samples(item.data, self._rate, item.max_seconds)
        if item.options.get(SAMPLES):
            return {"samples": samples, "rate": np.array(self._rate)}, ""
        try:
            return self._make(samples)
        except (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError) as error:
            raise UnreadableError(f"the model's processor refuses it: {error}") from error

    def _alone(self, samples: np.ndarray) -> tuple[Features, str]:
        """Whisper: one window, and one token."""
        self._check_length(samples)
        made = self._extractor(samples, **self._defaults)
        return {"input_features": made["input_features"]}, self._processor.audio_token

    def _check_length(self, samples: np.ndarray) -> None:
        longest = getattr(self._extractor, "n_samples", None)
        if longest and self._defaults.get("truncation", True) and len(samples) > longest:
            seconds = longest / self._rate
            raise UnreadableError(
                f"this model hears {seconds:g} s at once, the sound has "
                f"{len(samples) / self._rate:.1f} s"
            )

    def _by_processor(self, samples: np.ndarray) -> tuple[Features, str]:
        self._check_length(samples)
        made, [text] = getattr(self._processor, _PROCESS)([samples], **self._defaults)
        unused = set(self._processor.unused_input_names)
        return {name: np.asarray(x) for name, x in made.items() if name not in unused}, text

    def _in_windows(self, samples: np.ndarray) -> tuple[Features, str]:
        """Voxtral: as many windows as needed, the last one padded."""
        settings = self._defaults | {"padding": True, "truncation": False}
        hop = self._positions * self._extractor.hop_length
        made = self._extractor(samples, **settings | {"pad_to_multiple_of": hop})
        mel = np.asarray(made["input_features"])[0]
        windows = mel.reshape(len(mel), -1, self._positions).transpose(1, 0, 2)
        text = self._processor.audio_token * (self._tokens * len(windows))
        return {"input_features": np.ascontiguousarray(windows)}, text
