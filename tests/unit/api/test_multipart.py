"""Forms are read, and changed in one field, byte for byte."""

from __future__ import annotations

import httpx
import pytest

from sylvan.api.multipart import Part, parse_form, with_field
from sylvan.protocol.errors import RequestError


def form(**fields: str) -> tuple[str, bytes]:
    files = {"file": ("a.wav", b"\r\n--RIFF\x00\xff\r\n", "audio/wav")}
    request = httpx.Request("POST", "http://x", data=fields, files=files)
    return request.headers["content-type"], request.read()


def test_a_field_is_changed_and_nothing_else() -> None:
    kind, body = form(model="fast", language="en")
    wanted = parse_form(kind, body) | {"model": Part(b"whisper \xc3\xa4", None)}

    assert parse_form(kind, with_field(kind, body, "model", "whisper ä")) == wanted
    assert with_field(kind, body, "model", "fast") == body
    assert with_field(kind, body, "absent", "x") == body


def test_values_of_a_list_are_joined() -> None:
    request = httpx.Request(
        "POST",
        "http://x",
        data={"a[]": ["one", "two"], "b": ["first", "last"]},
        files={"file": b"x"},
    )
    parts = parse_form(request.headers["content-type"], request.read())
    assert (parts["a[]"].content, parts["b"].content) == (b"one,two", b"last")


@pytest.mark.parametrize("cut", [0, 10, -4])
def test_what_is_no_form_is_refused(cut: int) -> None:
    kind, body = form(model="fast")
    for call in (
        lambda: parse_form(kind, body[:cut]),
        lambda: with_field(kind, body[:cut], "a", "b"),
    ):
        with pytest.raises(RequestError):
            call()
    with pytest.raises(RequestError, match="multipart/form-data"):
        parse_form("application/json", body)
