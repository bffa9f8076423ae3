"""Header lookup by dictionary: routes look up more headers than a request has."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope


class QuickHeaders(Headers):
    """Like Starlette's class, which scans all headers at each lookup; the first duplicate wins."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self.raw)
        }

    def get(self, key: str, default: Any = None) -> Any:
        """Look up `key`, given in lower case."""
        return self._first.get(key, default)


class QuickRequest(Request):
    """A request with `QuickHeaders`."""

    @property
    def headers(self) -> Headers:
        if not hasattr(self, "_headers"):
            self._headers = QuickHeaders(self.scope)
        return self._headers
