"""Encodes texts without blocking other threads."""

from __future__ import annotations

import tokenizers

from sylvan.protocol.errors import RequestError

LONG_CHARS = 2048
PANIC = "PanicException"  # pyo3's; it cannot be imported, and is not an Exception


def token_ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text.

    Long texts use the library's batch call: the single call holds Python's lock, for seconds per
    megabyte, and is slower because it computes token offsets.

    Raises:
        RequestError: the library gives up, for example because a tokenizer pattern is too slow.
    """
    try:
        if len(text) <= LONG_CHARS:
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        [found] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        message = f"text: the model's tokenizer cannot read it: {error}"
        raise RequestError(message, param="text") from None
    return found.ids
