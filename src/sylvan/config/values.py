"""Types of configuration values: bounds in the type, sizes with suffixes, secrets."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from typing import Annotated, Literal, NoReturn

import msgspec

Auto = Literal["auto"]

Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Tokens = Annotated[int, msgspec.Meta(ge=1, extra={"unit": "tokens"})]
"""A number of tokens; text may use the suffixes k, M (thousands) and Ki, Mi (1024s)."""
AnyTokens = Annotated[int, msgspec.Meta(ge=0, extra={"unit": "tokens"})]
Bytes = Annotated[int, msgspec.Meta(ge=1 << 10, extra={"unit": "bytes"})]
"""A size of at least 1 KiB; text may say `512MiB`, `2GB`, `2g`."""
Fraction = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Depth = Annotated[int, msgspec.Meta(ge=1, le=64)]
"""Number of draft tokens."""
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Secret:
    """A text that is never shown, logged, encoded or pickled; only `reveal` returns it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text itself."""
        return self._text

    def matches(self, candidate: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self._text.encode(), candidate.encode())

    def __repr__(self) -> str:
        return "Secret(***)"

    def __str__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.matches(other.reveal())

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret cannot be serialised")


def no_network(texts: Iterable[str]) -> str | None:
    """The first text that is neither an IP address nor a network such as `10.0.0.0/8`."""
    for text in texts:
        try:
            ipaddress.ip_network(text)
        except ValueError:
            return text
    return None


def not_an_address(proxies: Iterable[str]) -> str:
    """The warning for a wrong entry of `server.trusted_proxies`."""
    return (
        f"server.trusted_proxies: {no_network(proxies)!r} is no IP address and no network "
        "(such as 10.0.0.0/8, without bits of a host)"
    )
