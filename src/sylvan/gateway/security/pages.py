"""Which calls were made by web pages that may call, the gateway's own among them."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sylvan.utils.origins import host_of, is_loopback, is_own

PAGE_HEADERS = (
    "origin",
    "referer",
    "sec-fetch-dest",
    "sec-fetch-mode",
    "sec-fetch-site",
    "sec-fetch-user",
)
"""By which a browser tells of the page that makes a call."""


@dataclass(frozen=True, slots=True)
class TrustedPages:
    """Pages whose calls are passed on as the gateway's own.

    A worker without a key refuses pages of other origins. It knows the gateway by another address
    than the page does, so that it cannot tell which page is the gateway's; the gateway can.

    Attributes:
        origins: Those that the operator named.
        open: There are no keys: anyone who reaches the gateway is a client.
    """

    origins: Collection[str]
    open: bool

    def made(self, headers: Mapping[str, str]) -> bool:
        """Whether such a page made the call with these headers."""
        origin, authority = headers.get("origin"), headers.get("host", "")
        if origin is None:
            return False
        if origin in self.origins:
            return True
        # without keys a page of any name may have had its name point here (DNS rebinding)
        return is_own(origin, authority) and (not self.open or _is_address(host_of(authority)))


def _is_address(host: str | None) -> bool:
    """Whether no name server was asked where this is."""
    if host is None or is_loopback(host):
        return host is not None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
