"""Strict JSON."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.api.strict_json import DEFAULT_LIMITS, decode_json
from sylvan.protocol.errors import RequestError

DEEP = DEFAULT_LIMITS.depth + 1
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc\u4f60"), inner),
)


@given(value=VALUES, ascii_only=st.booleans())
def test_valid_json_is_decoded_as_it_is(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert decode_json(text.encode()) == value


@given(body=st.binary(max_size=50))
def test_any_bytes_give_a_value_or_a_request_error(body):
    with contextlib.suppress(RequestError):
        decode_json(body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"a": NaN}', "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"1e400", "too large"),
        (b"18446744073709551616", "64 bits"),
        (b"-9223372036854775809", "64 bits"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' occurs twice"),
        (b'"\\udc00"', "surrogate"),
        (b'"\xc3"', "UTF-8"),
        (b"[" * DEEP + b"]" * DEEP, "deeper"),
        (b'{"a":' * DEEP + b"1" + b"}" * DEEP, "deeper"),
        (b"[" * 10**6, "deeper"),
        (b"[" + b"1," * (DEFAULT_LIMITS.values + 1) + b"1]", "values"),
        (b"\x00", "not valid JSON"),
        (b"'a'", "not valid JSON"),
    ],
)
def test_what_is_no_strict_json_is_refused(body, words):
    with pytest.raises(RequestError, match=words):
        decode_json(body)


def test_numbers_at_the_limits_are_kept():
    assert decode_json(b"[18446744073709551615, -9223372036854775808]") == [2**64 - 1, -(2**63)]
    assert decode_json(b'"\\ud83d\\ude00"') == "\U0001f600"
    deepest = b"[" * DEFAULT_LIMITS.depth + b"]" * DEFAULT_LIMITS.depth
    assert json.dumps(decode_json(deepest)).encode() == deepest
