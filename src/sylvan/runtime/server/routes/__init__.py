"""The tables of all routes; the most frequently called come first."""

from __future__ import annotations

from sylvan.runtime.server.endpoint import Endpoint
from sylvan.runtime.server.routes.native import NATIVE
from sylvan.runtime.server.routes.openai import OPENAI
from sylvan.runtime.server.routes.unsupported import UNSUPPORTED
from sylvan.runtime.server.routes.vendors import VENDORS

ENDPOINTS: tuple[Endpoint, ...] = (*OPENAI, *NATIVE, *VENDORS, *UNSUPPORTED)
