"""Which calls come from web pages that may call, such as the gateway's own page."""

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
"""Headers in which a browser names the page that makes a call."""


@dataclass(frozen=True, slots=True)
class TrustedPages:
    """Pages whose calls are forwarded as the gateway's own.

    A worker without a key rejects pages of other origins. It knows the gateway under another
    address than the page does, so only the gateway can recognise its own page.

    Attributes:
        origins: Origins that the operator allowed.
        open: No keys are configured: anyone who reaches the gateway is a client.
    """

    origins: Collection[str]
    open: bool

    def made(self, headers: Mapping[str, str]) -> bool:
        """Whether a trusted page made the call with these headers."""
        origin, authority = headers.get("origin"), headers.get("host", "")
        if origin is None:
            return False
        if origin in self.origins:
            return True
        # without keys, a page's host name may have been re-pointed to this machine (DNS rebinding)
        return is_own(origin, authority) and (not self.open or _is_address(host_of(authority)))


def _is_address(host: str | None) -> bool:
    """Whether the host is an IP address, which no name server can re-point."""
    if host is None or is_loopback(host):
        return host is not None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
