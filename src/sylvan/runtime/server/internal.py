"""Calls routes internally, for requests of batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, NoReturn

import orjson
from starlette.requests import Request

from sylvan.api.client_fields import with_client_field
from sylvan.api.errors import error_body
from sylvan.api.extras import unknown_fields
from sylvan.api.validation import parse
from sylvan.protocol.errors import SylvanError
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import INTERNAL_ERROR, Call, Endpoint, error_response
from sylvan.runtime.server.keyring import Tenant
from sylvan.runtime.server.security import Gate
from sylvan.utils.tasks import settled
from sylvan.utils.threads import call_in_thread

log = logging.getLogger(__name__)

LOWEST_PRIORITY = -(2**31)


class InternalCaller:
    """Calls routes without a client, at the lowest priority."""

    def __init__(self, context: Context, gate: Gate, table: Iterable[Endpoint]) -> None:
        self._context = context
        self._gate = gate
        self._table = {e.path: e for e in table if e.body is not None}

    async def __call__(self, tenant: str, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and body of the answer; an internal error yields status 500."""
        outcome = await settled(self._call(self._table[path], tenant, body))
        if isinstance(outcome, BaseException):
            log.error("request of a batch failed path=%s", path, exc_info=outcome)
            return 500, error_body(self._table[path].family, 500, INTERNAL_ERROR)
        return outcome

    async def _call(self, endpoint: Endpoint, tenant: str, body: Any) -> tuple[int, Any]:
        assert endpoint.body is not None, "only routes with a body are in the table"
        names: dict[str, str] = {}
        owner = Tenant(name=tenant)
        path = endpoint.path
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        try:
            if endpoint.budgeted:
                self._context.keyring.admit(owner)
            asked = {**body, "priority": LOWEST_PRIORITY}
            parsed = await call_in_thread(parse, endpoint.body, asked)  # may be large
            names.update(endpoint.field_names)
            call = Call(
                request=Request(scope, _no_messages),
                body=parsed,
                query=None,
                tenant=owner,
                context=self._context,
                ignored=unknown_fields(parsed),
                gate=self._gate,
                names=names,
            )
            response = await endpoint.handler(call)
        except SylvanError as error:
            response = error_response(endpoint.family, with_client_field(error, names))
        return response.status_code, orjson.loads(response.body)


async def _no_messages() -> NoReturn:
    """Receive nothing: there is no client that could disconnect."""
    await asyncio.Event().wait()
    raise AssertionError("never set")
