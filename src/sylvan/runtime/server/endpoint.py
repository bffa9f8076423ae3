"""Declarative routes: access level, input and output types, error format.

One wrapper around every handler does what routes share, in this order: authentication, budget,
body, query; then the handler; then errors in the format of the route's API.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import orjson
from pydantic import BaseModel
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from sylvan.api.client_fields import with_client_field
from sylvan.api.errors import Family, anthropic_overflow, error_body
from sylvan.api.extras import BOOTSTRAP, MAX_NAMED, check_rank, unknown_fields
from sylvan.api.strict_json import JsonLimits, decode_json
from sylvan.api.validation import WireModel, parse
from sylvan.protocol.errors import (
    CapacityError,
    ContextLengthError,
    RequestError,
    SylvanError,
)
from sylvan.runtime.server.body import (
    ClientGoneError,
    check_charset,
    check_content_type,
)
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.keyring import Tenant
from sylvan.runtime.server.observe.origin import Arrival, origin_of
from sylvan.runtime.server.schema_formats import unknown_formats
from sylvan.runtime.server.security import CallRefusal, Gate, Level
from sylvan.runtime.server.streaming import GONE
from sylvan.runtime.server.tenant_calls import CountedResponse
from sylvan.runtime.serving.journal import JOURNAL_KEY
from sylvan.runtime.serving.pairing import Pairing, read_pairing
from sylvan.runtime.serving.service import GenerationService
from sylvan.utils.names import random_hex
from sylvan.utils.variants import variant

log = logging.getLogger(__name__)

INTERNAL_ERROR = "Internal error; see the server's log."
CLIENT_GONE = 499  # never sent; logged as the status when the client disconnected
IGNORED_HEADER = "x-sylvan-ignored-fields"
IGNORED_COUNT_HEADER = "x-sylvan-ignored-count"
FORMATS_HEADER = "x-sylvan-unknown-formats"
REQUEST_ID = "x-request-id"
RECEIVED = "sylvan.received_s"
"""Key in the ASGI scope for the arrival time of a call."""
_REQUEST_ID_NAME = REQUEST_ID.encode()
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_RANK_HEADER = "x-data-parallel-rank"
_UNREAD = (b"x-override-", b"x-sglext-ids-framed", b"x-smg-routing-key")
"""Headers of SGLang that have no effect here."""

Body = TypeVar("Body", bound=WireModel | None)
Wire = TypeVar("Wire", bound=WireModel)


class Call(msgspec.Struct, Generic[Body], frozen=True, kw_only=True):
    """One validated call of a route.

    Attributes:
        request: The ASGI request.
        body: The parsed body; None if the route has none.
        query: The parsed query, if the route declares one.
        tenant: The authenticated tenant.
        context: The dependencies.
        ignored: Unknown fields of the body.
        formats: Unknown `format` names in its schemas.
        gate: Authenticates.
        names: Maps the engine's field names to those in the body: the route's names, and those that
            a handler adds depending on the body.
    """

    request: Request
    body: Body
    query: Any
    tenant: Tenant
    context: Context
    ignored: list[str]
    gate: Gate
    formats: list[str] = msgspec.field(default_factory=list)
    names: dict[str, str] = msgspec.field(default_factory=dict)

    def require_level(self, level: Level) -> None:
        """Check for a higher access level than that of the route.

        Raises:
            RequestError: The caller lacks it (401 or 403).
        """
        found = self.gate.check(level, self.request.headers)
        if isinstance(found, CallRefusal):
            raise RequestError(found.message, status=found.status)


Handler = Callable[[Call[Any]], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Endpoint:
    """A route.

    Attributes:
        path: Path in FastAPI's syntax.
        handler: The handler.
        methods: HTTP methods.
        family: API whose error format is used.
        level: Required access level.
        body: Type of the body; None: no body is read.
        body_optional: An empty body counts as `{}`.
        typed: The `content-type` must be JSON.
        query: Type of the query.
        reply: Type of the JSON answer; None: see `media_type`.
        media_type: Media type of an answer that is not JSON.
        stream: Media type of the answer in streaming or another alternative form.
        statuses: Error statuses besides the usual ones.
        tag: Section in the API documentation.
        summary: One line for the API documentation.
        form: The body is a form with a file, parsed by the handler.
        plain_statuses: Errors with these statuses use `media_type`.
        reply_on_failure: Failures of valid requests use the type `reply` too.
        field_names: Maps the engine's field names to those of the API.
        budgeted: Counts against the tenant's budget.
        missing_feature: What the server lacks to serve this; the route answers 501.
    """

    path: str
    handler: Handler
    methods: tuple[str, ...] = ("POST",)
    family: Family = Family.NATIVE
    level: Level = Level.NORMAL
    body: type[WireModel] | None = None
    body_optional: bool = False
    typed: bool = False
    query: type[WireModel] | None = None
    reply: type[BaseModel] | None = None
    media_type: str = "application/json"
    stream: str | None = None
    statuses: tuple[int, ...] = ()
    tag: str = "Native"
    summary: str = ""
    field_names: Mapping[str, str] = field(default_factory=dict)
    budgeted: bool = False
    form: bool = False
    plain_statuses: tuple[int, ...] = ()
    reply_on_failure: bool = False
    missing_feature: str = ""


Handle = Callable[[Request], Awaitable[Response]]
Routes = Sequence[tuple[Endpoint, Handle]]
"""Endpoints and what answers their calls."""


def serve(endpoint: Endpoint, context: Context, gate: Gate) -> Handle:
    """Handle a call; the endpoint registered with FastAPI."""
    answer = _answering(endpoint, context, gate)

    async def handle(request: Request) -> Response:
        request.scope[RECEIVED] = context.clock()
        try:
            with context.accounts.under_way(endpoint.path, request.method):
                response = await admit(request)
        finally:
            context.bodies.free(request)
        context.accounts.called(endpoint.path, request.method, response.status_code)
        response.raw_headers.append((_REQUEST_ID_NAME, _request_id(request).encode()))
        return response

    async def admit(request: Request) -> Response:
        changes = "POST" in endpoint.methods and not endpoint.missing_feature
        simple = changes and request.method in ("GET", "HEAD")
        tenant = gate.check(endpoint.level, request.headers, simple=simple)
        if isinstance(tenant, CallRefusal):
            return _refuse(endpoint.family, tenant)
        try:
            end = context.calls.begin(tenant)
        except CapacityError as error:
            context.accounts.refused(error)
            return error_response(endpoint.family, error)
        if end is None:
            return await answer(request, tenant)
        try:
            return CountedResponse(await answer(request, tenant), end)
        except BaseException:  # cancelled: nothing is sent
            end()
            raise

    return handle


def _answering(
    endpoint: Endpoint, context: Context, gate: Gate
) -> Callable[[Request, Tenant], Awaitable[Response]]:
    """Run the handler of an admitted call; turn errors into answers."""

    async def answer(request: Request, tenant: Tenant) -> Response:
        checked, names = False, dict[str, str]()  # bodies are validated under their own field names
        try:
            if endpoint.budgeted:
                context.keyring.admit(tenant)
            journal = request.scope.get(JOURNAL_KEY)
            service = context.service.of_call(journal)
            if journal is not None and journal.ticket.tenant is not None:
                tenant = Tenant(name=journal.ticket.tenant)
            call = await _read(endpoint, request, tenant, (context, service), gate)
            checked, names = True, call.names
            response = await endpoint.handler(call)
        except ClientGoneError:
            request.scope[GONE] = True
            return Response(status_code=CLIENT_GONE)
        except SylvanError as error:
            context.accounts.refused(error)
            response = error_response(
                endpoint.family, with_client_field(error, names), checked=checked
            )
        except Exception:  # re-raising would close the client's connection
            log.exception("call failed path=%s", endpoint.path)
            response = json_response(error_body(endpoint.family, 500, INTERNAL_ERROR), status=500)
        else:
            _name_ignored(response, call)
        return response

    return answer


def _request_id(request: Request) -> str:
    """Return the request ID sent by the client or a proxy, or a new one."""
    given = request.headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{random_hex(12)}"


def error_response(family: Family, error: SylvanError, *, checked: bool = True) -> Response:
    """Build the answer for an error; `checked` is False until the body is validated."""
    status, message, param = error_parts(error)
    if family is Family.ANTHROPIC and isinstance(error, ContextLengthError):
        message = anthropic_overflow(error) or message
    kind = "Bad Request" if not checked and status == 400 and family is Family.OPENAI else None
    content = error_body(family, status, message, param=param, kind=kind, code=error_code(error))
    headers: dict[str, str] = {}
    if isinstance(error, CapacityError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return json_response(content, status=status, headers=headers)


def error_parts(error: SylvanError) -> tuple[int, str, str | None]:
    """Return the status, message and field of an error."""
    if isinstance(error, RequestError):
        return error.status, str(error), error.param
    if isinstance(error, CapacityError):
        return error.status, str(error), None
    return 500, f"The model failed: {error}", None


def error_code(error: SylvanError) -> str | None:
    """Return the `code` by which OpenAI clients recognise an error."""
    return error.code if isinstance(error, RequestError) else None


class NotFoundError(RequestError):
    """A named object does not exist; `code` says which type."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, status=404, code=code)


def json_response(
    content: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Build a JSON answer."""
    data = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return Response(data, status, headers, "application/json")


def text_response(content: str, *, status: int = 200) -> Response:
    """Build a plain-text answer."""
    return Response(content, status, None, "text/plain; charset=utf-8")


async def _read(
    endpoint: Endpoint,
    request: Request,
    tenant: Tenant,
    parts: tuple[Context, GenerationService],
    gate: Gate,
) -> Call[Any]:
    context, service = parts
    body, ignored, formats, pairing = None, [], [], Pairing()
    if endpoint.body is not None:
        raw = await context.bodies.read(request)
        if raw or not endpoint.body_optional:
            check_charset(request)
            if endpoint.typed:
                check_content_type(request)
            model, limit = endpoint.body, context.bodies.limits.json
            body, formats = await context.bodies.decoded(
                raw, lambda raw: _decode(model, raw, limit)
            )
        else:
            body = endpoint.body()
        pairing = read_pairing(body, endpoint.path, context.role)
        ignored = unknown_fields(body, BOOTSTRAP if context.role.current else ())
        _check_header(request)
        ignored += [
            k.decode("latin-1") for k, _ in request.scope["headers"] if k.startswith(_UNREAD)
        ]
    arrival = _arrival(endpoint, request, body)
    origin = origin_of(context.settings.observe, arrival)
    context = variant(context, service=variant(service, pairing=pairing, origin=origin))
    query = None
    if endpoint.query is not None:
        query = _read_query(endpoint.query, request.query_params)
    return Call(
        request=request,
        body=body,
        query=query,
        tenant=tenant,
        context=context,
        ignored=ignored,
        formats=formats,
        gate=gate,
        names=dict(endpoint.field_names),
    )


def _decode(model: type[Wire], raw: bytes, limits: JsonLimits) -> tuple[Wire, list[str]]:
    """Decode and validate a body; also return unknown schema formats. May run in a thread."""
    decoded = decode_json(raw, limits)
    formats = unknown_formats(decoded) if b"format" in raw else []
    return parse(model, decoded), formats


def _arrival(endpoint: Endpoint, request: Request, body: WireModel | None) -> Arrival:
    client = request.client
    return Arrival(
        name=f"{request.method} {endpoint.path}",
        received_s=request.scope.get(RECEIVED, 0.0),
        headers=request.headers,
        peer=f"{client.host}:{client.port}" if client else "",
        extra=(body.model_extra if body is not None else None) or {},
    )


def _check_header(request: Request) -> None:
    """Check the replica named in a header by routers, which overrides the body."""
    rank = request.headers.get(_RANK_HEADER)
    if rank is not None:
        check_rank(_RANK_HEADER, int(rank) if rank.isdecimal() and len(rank) < 10 else rank)


def _read_query(model: type[WireModel], params: QueryParams) -> WireModel:
    """Parse the query; numbers are parsed leniently, since a query is text."""
    values: dict[str, Any] = {}
    for name, text in params.items():
        kind = model.model_fields[name].annotation if name in model.model_fields else str
        numeric = kind is not None and kind is not str and "str" not in str(kind)
        values[name] = _number(name, text) if numeric and "Literal" not in str(kind) else text
    return parse(model, values)


def _number(name: str, text: str) -> float | int | bool | str:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text) if text.lstrip("-").isdigit() and len(text) < 20 else float(text)
    except ValueError as error:
        message = f"{name}: expected a number, not {text[:40]!r}."
        raise RequestError(message, param=name) from error


def _refuse(family: Family, refusal: CallRefusal) -> Response:
    if family is Family.ANTHROPIC:
        content = error_body(family, refusal.status, refusal.message)
    else:
        content = {"error": refusal.message}
    headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else {}
    return json_response(content, status=refusal.status, headers=headers)


def _name_ignored(response: Response, call: Call[Any]) -> None:
    if not call.ignored and not call.formats:
        return
    for header, names in ((IGNORED_HEADER, call.ignored), (FORMATS_HEADER, call.formats)):
        if names:
            response.headers[header] = ", ".join(_ascii(name) for name in names[:MAX_NAMED])
    if call.ignored:
        response.headers[IGNORED_COUNT_HEADER] = str(len(call.ignored))


def _ascii(name: str) -> str:
    """Make a client's name safe for a header."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-.[]") else "?" for c in name[:64])
