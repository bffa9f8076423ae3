from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sylvan.protocol.messages import (
    Abort,
    TextBatch,
    TextOutput,
    TokenBatch,
    TokenLogprobs,
    TokenOutput,
    ToScheduler,
)
from sylvan.transport import arrays
from sylvan.transport.api import MessageError
from sylvan.transport.arrays import INLINE_MAX_BYTES, SharedArrays
from sylvan.transport.codec import MAX_MESSAGE_BYTES, MessageDecoder, MessageEncoder

DTYPES = ["<i4", "<f4", "|b1", "|u1", "<i8", "<f8", "<u2", "<f2"]


def batch(array: np.ndarray) -> TokenBatch:
    logprobs = TokenLogprobs(token_ids=array, logprobs=array)
    return TokenBatch(outputs=(TokenOutput(rid="a", token_ids=(1, 2), logprobs=logprobs),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 0, 3), (3, 4)])
def test_arrays_keep_dtype_shape_and_values(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    decoder: MessageDecoder[TokenBatch] = MessageDecoder(TokenBatch)

    got = decoder.decode(MessageEncoder().encode(batch(array))).outputs[0].logprobs

    assert got is not None
    assert got.logprobs.dtype == np.dtype(dtype)
    assert got.logprobs.shape == shape
    assert np.array_equal(got.logprobs, array)


def test_views_with_strides_are_sent_as_they_read() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    decoder: MessageDecoder[TokenBatch] = MessageDecoder(TokenBatch)

    got = decoder.decode(MessageEncoder().encode(batch(array))).outputs[0].logprobs

    assert got is not None
    assert np.array_equal(got.logprobs, array)


def test_infinities_and_nan_survive() -> None:
    array = np.array([np.nan, np.inf, -np.inf], np.float32)
    decoder: MessageDecoder[TokenBatch] = MessageDecoder(TokenBatch)

    got = decoder.decode(MessageEncoder().encode(batch(array))).outputs[0].logprobs

    assert got is not None
    assert got.logprobs.tobytes() == array.tobytes()


@pytest.mark.parametrize("bad", [np.array([object()]), np.array(["x"]), np.array([1j])])
def test_other_dtypes_may_not_travel(bad: np.ndarray) -> None:
    with pytest.raises(MessageError):
        MessageEncoder().encode(batch(bad))


def test_objects_may_not_travel() -> None:
    with pytest.raises(MessageError, match="may not travel"):
        MessageEncoder().encode({"x": object()})


def test_a_message_over_the_limit_is_refused() -> None:
    with pytest.raises(MessageError, match="over"):
        MessageEncoder().encode(Abort(rid="x" * (MAX_MESSAGE_BYTES + 1)))


@pytest.mark.parametrize("size", [INLINE_MAX_BYTES // 4, INLINE_MAX_BYTES // 4 + 1])
def test_only_arrays_over_the_limit_go_through_shared_memory(tmp_path: Path, size: int) -> None:
    array = np.arange(size, dtype=np.int32)
    data = MessageEncoder(SharedArrays(tmp_path)).encode(batch(array))
    decoder: MessageDecoder[TokenBatch] = MessageDecoder(TokenBatch, SharedArrays(tmp_path))

    files = list(tmp_path.iterdir())
    assert len(files) == (2 if array.nbytes > INLINE_MAX_BYTES else 0)
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)

    got = decoder.decode(data).outputs[0].logprobs
    assert got is not None
    assert np.array_equal(got.logprobs, array)
    assert not list(tmp_path.iterdir())


def test_arrays_that_find_no_room_in_shared_memory_go_inline(tmp_path: Path) -> None:
    nowhere = SharedArrays(tmp_path / "missing")
    array = np.arange(40_000, dtype=np.int32)
    decoder: MessageDecoder[TokenBatch] = MessageDecoder(TokenBatch)

    got = decoder.decode(MessageEncoder(nowhere).encode(batch(array))).outputs[0].logprobs

    assert got is not None
    assert np.array_equal(got.logprobs, array)


@pytest.mark.parametrize(
    "name", [b"../../etc/passwd", b"a1-1/../x", b"", b"lock", b"a1-1\n", b"\xff\xfe"]
)
def test_names_of_shared_arrays_cannot_leave_the_directory(tmp_path: Path, name: bytes) -> None:
    with pytest.raises(MessageError, match="does not name"):
        SharedArrays(tmp_path).take(name, 4)


def test_a_shared_array_of_another_size_is_refused_and_removed(tmp_path: Path) -> None:
    store = SharedArrays(tmp_path)
    name = store.put(np.zeros(10, np.int32))
    assert name is not None

    with pytest.raises(MessageError, match="40 bytes"):
        store.take(name.encode(), 44)
    with pytest.raises(MessageError, match="cannot be read"):
        store.take(name.encode(), 40)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"1234")
    (tmp_path / "a1-1").symlink_to(tmp_path / "secret")

    with pytest.raises(MessageError, match="cannot be read"):
        SharedArrays(tmp_path).take(b"a1-1", 4)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00",
        b"\xff\x01" + bytes(8),
        b"\x00\x09" + bytes(72),
        b"\x00\x01\x01",
        b"\x00\x01" + (3).to_bytes(8, "little") + bytes(11),
        b"\x00\x02" + (2**63).to_bytes(8, "little") * 2,
    ],
)
def test_malformed_arrays_are_refused(payload: bytes) -> None:
    with pytest.raises(MessageError):
        arrays.unpack(payload, None, shared=False)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"type": "no such"},
        {"type": "abort"},
        {"type": "abort", "rid": 5},
        {"type": "submit", "request": {"type": "generate", "rid": "a", "input_ids": [1]}},
        {"type": "abort", "rid": msgspec.msgpack.Ext(1, b"")},
        {"type": "abort", "rid": msgspec.msgpack.Ext(77, b"")},
    ],
)
def test_messages_of_another_shape_are_refused(value: object) -> None:
    decoder: MessageDecoder[ToScheduler] = MessageDecoder(ToScheduler)
    with pytest.raises(MessageError):
        decoder.decode(msgspec.msgpack.encode(value))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_a_message_error_and_nothing_else(data: st.DataObject) -> None:
    output = TokenOutput(rid="r", token_ids=(1, 2), embedding=np.arange(4, dtype=np.float32))
    whole = MessageEncoder().encode(
        TextBatch(outputs=(TextOutput(rid="r", text="x", output=output),))
    )
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    decoder: MessageDecoder[TextBatch] = MessageDecoder(TextBatch)

    with contextlib.suppress(MessageError):
        decoder.decode(bytes(damaged[: data.draw(st.integers(0, len(whole)))]))


def test_deeply_nested_bytes_are_a_message_error() -> None:
    decoder: MessageDecoder[ToScheduler] = MessageDecoder(ToScheduler)
    with pytest.raises(MessageError):
        decoder.decode(b"\x91" * 100_000)
