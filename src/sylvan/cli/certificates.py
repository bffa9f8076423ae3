"""Reloads TLS certificates while serving: new connections use the current files."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Protocol

from sylvan.config.values import Secret

logger = logging.getLogger(__name__)

_INTERVAL_S = 10.0

Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of each file."""


class Encryption(Protocol):
    """TLS settings: a section of a configuration."""

    @property
    def ssl_certfile(self) -> str | None:
        """Certificate chain; enables TLS."""
        ...

    @property
    def ssl_keyfile(self) -> str | None:
        """Private key file."""
        ...

    @property
    def ssl_keyfile_password(self) -> Secret | None:
        """Password of the private key."""
        ...


class Certificates:
    """The certificate of a TLS context, reloaded from its files.

    Args:
        context: TLS context of the listening server.
        settings: Where the files are.
    """

    def __init__(self, context: ssl.SSLContext, settings: Encryption) -> None:
        self._context, self._settings = context, settings
        self._seen = self._stamp()

    def refresh(self) -> bool:
        """Reload the files if they have changed; return whether they are now in use.

        Unreadable or mismatched files (for example between two writes) change nothing. Blocks.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # try a copy first
            self._load(self._context)
        except (OSError, ssl.SSLError) as error:
            logger.warning("server.ssl_certfile: the old certificate stays in use: %s", error)
            return False
        finally:
            self._seen = stamp
        logger.info("server.ssl_certfile: new connections use the new certificate")
        return True

    async def watch(self, interval_s: float = _INTERVAL_S) -> None:
        """Refresh every `interval_s` until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self.refresh()

    def _load(self, context: ssl.SSLContext) -> None:
        given = self._settings
        assert given.ssl_certfile is not None, "TLS is on"
        secret = given.ssl_keyfile_password
        password = "" if secret is None else secret.reveal()  # never ask on the terminal
        context.load_cert_chain(given.ssl_certfile, given.ssl_keyfile, lambda: password)

    def _stamp(self) -> Stamp:
        names = (self._settings.ssl_certfile, self._settings.ssl_keyfile)
        found: list[tuple[int, int, int]] = []
        for name in names:
            try:
                stat = Path(name).stat() if name else None
            except OSError:
                stat = None
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat else (0, 0, 0))
        return tuple(found)
