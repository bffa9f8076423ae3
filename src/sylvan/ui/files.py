"""Serves the files of the web UI: bytes, types and headers, for servers and gateways."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

Site = Literal["server", "gateway"]

INDEX = "index.html"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",  # pictures that a user attaches to a message
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # model output can never become HTML
        "trusted-types 'none'",
    )
)
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_NAME = re.compile(r"[a-z]{1,20}\.(?:js|css|svg|txt)")


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent.

    Attributes:
        body: Its bytes.
        headers: Response headers, by lower-case name.
    """

    body: bytes
    headers: Mapping[str, str]

    def is_known(self, etags: str | None) -> bool:
        """Whether a browser that sent this `If-None-Match` has the current version."""
        return etags is not None and self.headers["etag"] in etags


@functools.cache
def page_file(name: str, site: Site) -> PageFile | None:
    """Return a file of the UI; None if there is none of that name.

    Args:
        name: File name without directory.
        site: Kind of server, on which the contents depend.
    """
    if name != INDEX and _NAME.fullmatch(name) is None:
        return None
    path = files("sylvan.ui") / "assets" / name
    if not path.is_file():
        return None
    body = path.read_bytes()
    if name == INDEX:
        body = body.replace(b'data-site="server"', f'data-site="{site}"'.encode())
    headers = {
        "content-type": _TYPES[name.rpartition(".")[2]],
        "content-security-policy": POLICY,
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",  # revalidated each time, so that updates take effect
        "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return PageFile(body, headers)
