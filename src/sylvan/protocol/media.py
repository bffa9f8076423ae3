"""Images, videos, audio and encoded texts of a prompt, processed; the same in every process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec
import numpy as np

from sylvan.protocol.arrays import IntArray

MediaKind = Literal["image", "video", "audio", "text"]
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")
"""Kinds that clients send; a `text` is the prompt of a model that encodes it (T5, BART)."""
_PLURALS: Mapping[str, str] = MappingProxyType({"image": "images", "video": "videos"})
APART_TOKEN = 0
"""Stands for an item that has a vector of its own (CLIP): alone in its prompt, read by no layer."""
IMAGE_TOKENS: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekVLV2ForCausalLM": "<image>",
        "InternVLChatModel": "<IMG_CONTEXT>",
        "MiniCPMV": "<unk>",
        "Phi3VForCausalLM": "<|image|>",
    }
)
"""Placeholders of images, by architecture, whose number only the tokenizer tells."""
TEXT_IDS = "input_ids"
"""Name of the token ids among the features of a text, int64 (N,)."""


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image, video or audio clip of a prompt, or the text that an answer is decoded from.

    Positions [start, stop) of the prompt belong to it. Those whose token is `token_id` are
    placeholders: the encoder's vectors replace their embeddings, in order. `digest` identifies the
    encoder's input. `features` are that input by name, empty if removed. `grid` counts the vectors
    along time, height and width, for models whose rotary positions have these axes; `time_step` is
    the distance between two times in positions, which are rounded down. If text separates the
    placeholders, each part has some of the times.
    """

    kind: MediaKind
    start: int
    stop: int
    token_id: int
    digest: bytes
    features: dict[str, np.ndarray] = {}
    grid: tuple[int, int, int] | None = None
    time_step: float = 1.0

    def placeholders(self, input_ids: IntArray) -> IntArray:
        """Prompt positions that vectors replace, ascending."""
        found = np.flatnonzero(input_ids[self.start : self.stop] == self.token_id)
        return (found + self.start).astype(np.int32)

    def moved(self, by: int) -> MediaItem:
        """The item moved by `by` positions."""
        return msgspec.structs.replace(self, start=self.start + by, stop=self.stop + by)


def listed(kinds: Iterable[str]) -> str:
    """Kinds of media in a sentence: `images, videos and audio`."""
    *first, last = (_PLURALS.get(kind, kind) for kind in kinds)
    return f"{', '.join(first)} and {last}" if first else last


def media_tokens(input_ids: IntArray, media: Sequence[MediaItem]) -> dict[str, int]:
    """Number of placeholder tokens in a prompt, by kind of item that clients send."""
    found: dict[str, int] = {}
    for item in media:
        if item.kind in MEDIA_KINDS:
            found[item.kind] = found.get(item.kind, 0) + len(item.placeholders(input_ids))
    return found


def encoded_tokens(media: Sequence[MediaItem]) -> int:
    """Number of tokens of the texts that an encoder reads."""
    return sum(len(item.features[TEXT_IDS]) for item in media if item.kind == "text")
