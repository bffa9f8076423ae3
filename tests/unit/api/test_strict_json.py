"""Strict JSON."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.api.strict_json import DEFAULT_LIMITS, JsonLimits, decode_json
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


@given(value=VALUES, spaced=st.booleans(), ascii_only=st.booleans())
def test_both_decoders_give_the_same(value, spaced, ascii_only):
    separators = (" , ", "\t:\n") if spaced else (",", ":")
    text = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
    assert repr(decode_json(text.encode())) == repr(json.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "\\":", "a": 1}',
        '{"a" \n: 1, "a": 2}',
        '[{"b": 1}, {"a\\"": 1, "a\\"": "\\" : "}]',
        '{"a": 1, "\\u0061": 2}',
    ],
)
def test_no_name_is_lost_whatever_texts_look_like(text):
    with pytest.raises(RequestError, match="occurs twice"):
        decode_json(text.encode())


@pytest.mark.parametrize(
    "text", ["-0", "-0.0", "1E2", "1e+2", "0.1e-1", "1e-400", "123456789012345678"]
)
def test_numbers_have_the_type_and_sign_that_python_gives_them(text):
    assert repr(decode_json(f"[{text}]".encode())) == repr(json.loads(f"[{text}]"))


def test_names_are_limited_in_short_bodies_too():
    limits = JsonLimits(names=2)
    assert decode_json(b'{"a": 1, "b": 2}', limits) == {"a": 1, "b": 2}
    with pytest.raises(RequestError, match=r"limits\.body_names=2"):
        decode_json(b'{"a": 1, "b": 2, "c": 3}', limits)
    nested = b'{"a": [{"b": 1}]}'
    assert decode_json(nested, JsonLimits(depth=3)) == {"a": [{"b": 1}]}
    with pytest.raises(RequestError, match="deeper"):
        decode_json(nested, JsonLimits(depth=2))
