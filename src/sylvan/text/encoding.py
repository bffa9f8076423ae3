"""Token ids from the library, without holding up other threads."""

from __future__ import annotations

import tokenizers

from sylvan.protocol.errors import RequestError

LONG_CHARS = 2048
PANIC = "PanicException"  # of pyo3; it has no module to be imported from, and is no Exception


def token_ids(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text.

    Of a long one they come from the call for many texts: the other keeps Python's lock, seconds for
    megabytes, and takes longer since it finds where each token stands.

    Raises:
        RequestError: The library breaks off, as when a pattern of the tokenizer takes it too long.
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
