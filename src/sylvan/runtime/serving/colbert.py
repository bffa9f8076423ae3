"""Prepares texts for late-interaction models (ColBERT, arXiv:2004.12832) as the checkpoint says.

A marker token after the first token tells queries from documents. Queries are padded with mask
tokens, whose vectors count too (query expansion); vectors of punctuation in documents are dropped.
PyLate stores the rules in `config_sentence_transformers.json`, the original ColBERT code in
`artifact.metadata`.
"""

from __future__ import annotations

import functools
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from msgspec.structs import replace

from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.serving.prompts import FILE
from sylvan.runtime.tokenizer.types import EmbedInput, Vector
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.json_files import read_json

METADATA = "artifact.metadata"
Role = Literal["query", "document"]

_LONGEST = 1 << 16  # tokens that a file may ask for


@dataclass(frozen=True, slots=True)
class LateInteractionConfig:
    """The rules of one checkpoint.

    Attributes:
        markers: Marker token of queries, and of documents.
        lengths: Maximum tokens of a query and of a document, including special tokens; longer texts
            are truncated.
        expands: Whether queries are padded with mask tokens.
        sees_masks: Whether other tokens attend to these mask tokens.
        skipped: Words whose vectors are dropped from documents.
    """

    markers: tuple[str, str]
    lengths: tuple[int, int]
    expands: bool
    sees_masks: bool
    skipped: tuple[str, ...]

    def input_of(self, role: Role, text: str, tokenizer: Tokenizer, like: EmbedInput) -> EmbedInput:
        """Return the engine input for a text; `like` has the other fields.

        Raises:
            RequestError: The tokenizer lacks the marker or the mask token.
        """
        number = get_args(Role).index(role)
        ids = self._cut(text, self.lengths[number] - bool(self.markers[number]), tokenizer)
        if self.markers[number]:
            ids = [*ids[:1], _id_of(tokenizer, self.markers[number]), *ids[1:]]
        hidden = 0
        if role == "query" and self.expands:
            fill = self.lengths[0] - len(ids)
            ids += [_id_of(tokenizer, _mask_of(tokenizer))] * fill
            hidden = 0 if self.sees_masks else fill
        return replace(like, text=None, input_ids=ids, hidden=hidden)

    def document_vectors(self, vector: Vector, tokenizer: Tokenizer) -> np.ndarray:
        """Return the vectors of a document without those of skipped words. Shape: (n, D)."""
        idle = {tokenizer.token_id(word) for word in self.skipped} - {None}
        stays = [token not in idle for token in vector.input_ids]
        return vector.values[np.array(stays, bool)]

    def _cut(self, text: str, limit: int, tokenizer: Tokenizer) -> list[int]:
        """Tokenise a text, and truncate it without removing the special tokens around it."""
        ids = tokenizer.encode_user(text)
        if len(ids) <= limit:
            return ids
        inner = tokenizer.encode_user(text, add_special_tokens=False)
        around = len(ids) - len(inner)
        starts = (at for at in range(around + 1) if ids[at : at + len(inner)] == inner)
        first = next(starts, 0)
        return [*ids[:first], *inner[: max(0, limit - around)], *ids[first + len(inner) :]]


def _mask_of(tokenizer: Tokenizer) -> str:
    given = tokenizer.files.config.get("mask_token")
    name = given.get("content") if isinstance(given, dict) else given
    return str(name or "[MASK]")


def _id_of(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.token_id(name)
    if found is None:
        raise RequestError(f"the tokenizer of this model has no token {name!r}", param="model")
    return found


@functools.lru_cache(maxsize=16)
def read_late_interaction(model_path: str) -> LateInteractionConfig | None:
    """Read a checkpoint's rules; None: it is no late-interaction model.

    Raises:
        ConfigError: They are unreadable or invalid.
    """
    folder = Path(model_path)
    if (folder / METADATA).is_file():
        return _of_metadata(_read(folder / METADATA))
    raw = _read(folder / FILE) if (folder / FILE).is_file() else {}
    if "query_prefix" not in raw and "query_length" not in raw:
        return None
    words = raw.get("skiplist_words")
    return LateInteractionConfig(
        markers=(
            str(_given(raw, "query_prefix", "[Q] ")),
            str(_given(raw, "document_prefix", "[D] ")),
        ),
        lengths=(_length(raw, "query_length", 32), _length(raw, "document_length", 180)),
        expands=bool(_given(raw, "do_query_expansion", True)),
        sees_masks=bool(raw.get("attend_to_expansion_tokens")),
        skipped=tuple(map(str, string.punctuation if words is None else words)),
    )


def _of_metadata(raw: dict[str, Any]) -> LateInteractionConfig:
    return LateInteractionConfig(
        markers=(
            str(_given(raw, "query_token_id", "[unused0]")),
            str(_given(raw, "doc_token_id", "[unused1]")),
        ),
        lengths=(_length(raw, "query_maxlen", 32), _length(raw, "doc_maxlen", 220)),
        expands=True,
        sees_masks=bool(raw.get("attend_to_mask_tokens")),
        skipped=tuple(string.punctuation) if _given(raw, "mask_punctuation", True) else (),
    )


def _given(raw: dict[str, Any], name: str, usual: Any) -> Any:
    value = raw.get(name)
    return usual if value is None else value


def _length(raw: dict[str, Any], name: str, usual: int) -> int:
    value = _given(raw, name, usual)
    if not isinstance(value, int) or not 4 <= value <= _LONGEST:
        raise ConfigError(f"{name} must be in 4..{_LONGEST}, not {value!r}")
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}
