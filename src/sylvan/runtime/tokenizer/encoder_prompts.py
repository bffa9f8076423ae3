"""Prompts of encoder-decoder models: the encoder reads the text, the decoder only its start."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ContextLengthError, RequestError
from sylvan.protocol.media import TEXT_IDS, MediaItem
from sylvan.runtime.tokenizer.checks import CheckedPrompt, check_ids
from sylvan.runtime.tokenizer.types import ServedModelInfo

DECODER_PROMPT = "decoder_prompt"


def encoded_prompt(
    prompt: CheckedPrompt,
    begins: Sequence[int] | None,
    facts: ServedModelInfo,
    media: Sequence[MediaItem] = (),
) -> tuple[CheckedPrompt, MediaItem]:
    """Return what the decoder starts with, and the text as an item for the encoder.

    Args:
        prompt: The text.
        begins: How the answer begins, after the start token; None: as the checkpoint wants it.
        facts: The served model.
        media: Images of the text, which its encoder reads, too.

    Raises:
        RequestError: The text is empty, too long, or has ids that the model does not know.
    """
    limit = max(facts.vocab_size, *(token + 1 for token in (0, *facts.media_tokens.values())))
    ids, param = check_ids(prompt.ids, limit, prompt.param), prompt.param
    if not len(ids):
        raise RequestError(f"{param} is empty; the encoder needs a token", param=param)
    if len(ids) > facts.encoder_len:
        raise ContextLengthError.of_prompt(len(ids), facts.encoder_len, param)
    start, *forced = facts.decoder_prompt
    if begins is not None:
        forced = check_ids(begins, facts.vocab_size, DECODER_PROMPT).tolist()
    features = {TEXT_IDS: ids.astype(np.int64)}
    for name in media[0].features if media else ():
        features[name] = np.concatenate([item.features[name] for item in media])
    digest = _digest(ids, media)
    item = MediaItem(kind="text", start=0, stop=1, token_id=start, digest=digest, features=features)
    where = param if begins is None else DECODER_PROMPT
    return CheckedPrompt(np.array([start, *forced], np.int32), where), item


def _digest(ids: IntArray, media: Sequence[MediaItem]) -> bytes:
    found = hashlib.sha256(b"text|" + ids.astype("<i4").tobytes())
    for item in media:
        found.update(item.digest)
    return found.digest()
