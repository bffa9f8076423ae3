"""Serialises messages: msgpack of msgspec structs, one tagged union per direction."""

from __future__ import annotations

from typing import Any, Generic, cast

import msgspec
import numpy as np

from sylvan.transport import arrays
from sylvan.transport.api import Message, MessageError
from sylvan.transport.arrays import SharedArrays

MAX_MESSAGE_BYTES = 64 << 20
_INLINE_ARRAY = 1
_SHARED_ARRAY = 2


class MessageEncoder:
    """Encodes messages of at most `limit` bytes; None: no limit.

    Large arrays go to `store`, if there is one.
    """

    def __init__(
        self, store: SharedArrays | None = None, limit: int | None = MAX_MESSAGE_BYTES
    ) -> None:
        self._store, self._limit = store, limit
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)

    def encode(self, message: object) -> bytes:
        """Bytes of a message.

        Raises:
            MessageError: It is too large, or contains an unsupported type.
        """
        try:
            data = self._encoder.encode(message)
        except (TypeError, OverflowError) as error:
            raise MessageError(f"{type(message).__name__} cannot be sent: {error}") from error
        if self._limit is not None and len(data) > self._limit:
            raise MessageError(f"a message of {len(data)} bytes is over {self._limit}")
        return data

    def _hook(self, value: object) -> object:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} may not travel")
        shared, payload = arrays.pack(cast(arrays.Array, value), self._store)
        return msgspec.msgpack.Ext(_SHARED_ARRAY if shared else _INLINE_ARRAY, payload)


class MessageDecoder(Generic[Message]):
    """Decodes messages of one type, strictly.

    Args:
        kind: The union of messages that may arrive.
        store: Store of large arrays.
    """

    def __init__(self, kind: object, store: SharedArrays | None = None) -> None:
        self._store = store
        self._decoder = msgspec.msgpack.Decoder(
            cast(Any, kind), dec_hook=_check, ext_hook=self._array
        )

    def decode(self, data: bytes | memoryview) -> Message:
        """Decode a message.

        Raises:
            MessageError: The bytes are not a message of this type.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise MessageError(f"malformed message: {error}") from error

    def _array(self, code: int, payload: memoryview) -> arrays.Array:
        if code not in (_INLINE_ARRAY, _SHARED_ARRAY):
            raise MessageError(f"unknown extension {code}")
        return arrays.unpack(payload, self._store, shared=code == _SHARED_ARRAY)


def _check(kind: type, value: object) -> object:
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")  # noqa: TRY004
    return value
