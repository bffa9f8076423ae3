"""Builds prompts for models that retrieve page images (ColPali and similar).

The prompt of a page is its image and a fixed text. The prompt of a query has a prefix, and padding
tokens at its end whose vectors also count. Both texts come from processor_config.json
(arXiv:2407.01449, section 4).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sylvan.protocol.errors import RequestError
from sylvan.runtime.tokenizer.types import EmbedInput, ServedModelInfo
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.json_files import read_json

_PADDING = 10  # padding tokens at the end of a query
_PAGE = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
    "<|im_end|><|endoftext|>"
)
_MODERN = "<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:"


@dataclass(frozen=True, slots=True)
class RetrievalPrompts:
    """The fixed texts in prompts of queries and pages.

    Attributes:
        query: Prefix of a query, after the start token if there is one.
        page: Text of a page's prompt.
        starts: Whether prompts have the start token, and a page's image comes before its text.
        augmented: Padding token of queries whose prompts have the tokenizer's special tokens; empty
            for other models.
    """

    query: str
    page: str
    starts: bool
    augmented: str = ""

    def of_query(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Return the token IDs of a query; its text never yields control tokens."""
        segments = [(self.query, True), (text, False)]
        if self.augmented:
            segments.append((self.augmented * _PADDING, True))
            return tokenizer.affixes.added(tokenizer.encode_segments(segments), text)
        padding = tokenizer.pad_id if tokenizer.pad_id is not None else tokenizer.eos_ids[0]
        end = tokenizer.token_name(padding) or ""
        ids = tokenizer.encode_segments([*segments, (f"{end * _PADDING}\n", True)])
        return [*self._start(tokenizer), *ids]

    def of_page(self, image: int, tokenizer: Tokenizer) -> list[int]:
        """Return the token IDs of a page; `image` is the placeholder token of its image."""
        if not self.starts:
            return tokenizer.encode(self.page, add_special_tokens=bool(self.augmented))
        text = tokenizer.encode(f"{self.page}\n", add_special_tokens=False)
        return [image, *self._start(tokenizer), *text]

    def _start(self, tokenizer: Tokenizer) -> list[int]:
        return [tokenizer.bos_id] if self.starts and tokenizer.bos_id is not None else []


@functools.lru_cache(maxsize=16)
def read_retrieval(model_path: str, architecture: str) -> RetrievalPrompts | None:
    """Read a checkpoint's prompts; None: the model does not retrieve pages."""
    usual = {
        "ColModernVBertForRetrieval": RetrievalPrompts(
            "", _MODERN, starts=False, augmented="<end_of_utterance>"
        ),
        "ColPaliForRetrieval": RetrievalPrompts("Question: ", "Describe the image.", starts=True),
        "ColQwen2ForRetrieval": RetrievalPrompts("Query: ", _PAGE, starts=False),
    }.get(architecture)
    if usual is None:
        return None
    try:
        said: Any = read_json(Path(model_path) / "processor_config.json")
    except (OSError, ValueError):
        said = {}
    found = said if isinstance(said, dict) else {}
    return RetrievalPrompts(
        query=found.get("query_prefix") or usual.query,
        page=found.get("visual_prompt_prefix") or usual.page,
        starts=usual.starts,
        augmented=usual.augmented,
    )


def query_input(asked: EmbedInput, prompts: RetrievalPrompts, tokenizer: Tokenizer) -> EmbedInput:
    """Return the input with its text, if it has one, as the prompt of a query."""
    if asked.text is None:
        return asked
    ids = prompts.of_query(asked.text, tokenizer)
    return msgspec.structs.replace(asked, text=None, input_ids=ids)


def check_no_chunks(facts: ServedModelInfo) -> None:
    """Reject late chunking, which models that retrieve pages do not support.

    Raises:
        RequestError: The model retrieves pages.
    """
    if read_retrieval(facts.model_path, facts.architecture) is not None:
        message = "late_chunking: this model reads queries and pages, not chunks of a text."
        raise RequestError(message, param="late_chunking")
