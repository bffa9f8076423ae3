"""Reads request bodies: JSON only, with limits per body and for all bodies together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from sylvan.api.content_coding import decompress
from sylvan.api.strict_json import JsonLimits
from sylvan.protocol.errors import RequestError
from sylvan.utils.body_memory import BodyMemory
from sylvan.utils.threads import call_in_pool

INLINE_BYTES = 32 << 10
"""Smaller bodies are decoded inline, which takes under 2 ms."""
_THREADS = 2  # threads share the interpreter's lock: more would be no faster
_TAKEN = "sylvan.body_bytes"  # key of the ASGI scope

_CHARSETS = ("utf-8", "utf8", "us-ascii")

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client disconnected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """Limits of bodies.

    Attributes:
        each: Bytes of one body.
        together: Bytes of the bodies of all calls in flight.
        json: Structural limits of JSON.
    """

    each: int = 32 << 20
    together: int = 1 << 30
    json: JsonLimits = field(default_factory=JsonLimits)


class Bodies:
    """The bodies of calls in flight; belongs to one event loop."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self._memory = BodyMemory(limits.together, "limits.bodies_bytes")
        self._pool = ThreadPoolExecutor(_THREADS, "sylvan-bodies")  # created with the first body

    def limit(self, limits: BodyLimits) -> None:
        """Set new limits for later bodies."""
        self.limits = limits
        self._memory.limit = limits.together

    @property
    def held(self) -> int:
        """Bytes of all bodies held now."""
        return self._memory.held

    async def read(self, request: Request) -> bytes:
        """Read the whole body of a call; `free` releases its memory budget after the call.

        Raises:
            RequestError: The limit is exceeded, or `content-length` exceeds it (413).
            CapacityError: The bodies of all calls use too much memory.
            ClientGoneError: The client disconnected before the end.
        """

        def take(size: int) -> None:
            self._memory.take(size)
            request.scope[_TAKEN] = request.scope.get(_TAKEN, 0) + size

        return await read_body(request, self.limits.each, take)

    def free(self, request: Request) -> None:
        """Release the memory budget of a call's body."""
        self._memory.give_back(request.scope.pop(_TAKEN, 0))

    async def decoded(self, raw: bytes, decode: Callable[[bytes], T]) -> T:
        """Run `decode` on a body; for a large body in a thread, so that other calls proceed."""
        if len(raw) <= INLINE_BYTES:
            return decode(raw)
        return await call_in_pool(self._pool, decode, raw)


async def read_body(
    request: Request, max_bytes: int, take: Callable[[int], None] | None = None
) -> bytes:
    """Read the whole body, if it is not larger than `max_bytes`.

    Args:
        request: The request.
        max_bytes: Limit of the body, both compressed and decompressed.
        take: Called with the size of each chunk; may raise.

    Raises:
        RequestError: The limit is exceeded, or `content-length` exceeds it (413).
        ClientGoneError: The client disconnected before the end.
    """
    expected = request.headers.get("expect", "")
    if expected and expected.strip().lower() != "100-continue":
        raise RequestError(f"Expect: only 100-continue is met, not {expected[:40]!r}.", status=417)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        if take is not None:
            take(len(chunk))
        if chunk:
            chunks.append(chunk)
    data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    plain = decompress(data, request.headers.get("content-encoding", ""), max_bytes)
    if len(plain) > max_bytes:
        raise _too_large(max_bytes)
    if take is not None and plain is not data:
        take(len(plain))
    return plain


def check_content_type(request: Request) -> None:
    """Reject a body whose `content-type` is not JSON.

    Raises:
        RequestError: The type is another (400).
    """
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    main, _, sub = kind.partition("/")
    if main != "application" or not (sub == "json" or sub.endswith("+json")):
        shown = f"not {given[:80]!r}" if given else "but is missing"
        raise RequestError(f"Content-Type must be application/json, {shown}.")


def check_charset(request: Request) -> None:
    """Reject a body whose `charset` is not UTF-8.

    Raises:
        RequestError: The charset is another (415).
    """
    for parameter in request.headers.get("content-type", "").split(";")[1:]:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in _CHARSETS:
            message = f"Content-Type: expected charset utf-8, not {charset[:40]!r}."
            raise RequestError(message, status=415)


def _too_large(max_bytes: int) -> RequestError:
    shown = f"{max_bytes / 2**20:g} MiB"
    message = (
        f"The body is larger than {shown} ({max_bytes} bytes), the limit of this server "
        "(server.max_body_bytes)."
    )
    return RequestError(message, status=413, setting="server.max_body_bytes")
