"""Shared by all methods: authentication, parsing, deadlines, errors."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError, Message
from starlette.datastructures import Headers

from sylvan.protocol.errors import CapacityError, RequestError, SylvanError
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.keyring import Tenant
from sylvan.runtime.server.observe.origin import Arrival, origin_of
from sylvan.runtime.server.security import CallRefusal, Gate, Level
from sylvan.runtime.server.tickets import trusts_gateway

TENANT_KEY = "x-sylvan-tenant"
"""Metadata key with which a gateway names the tenant it calls for."""
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

Rpc = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class RpcCall:
    """One call of a method.

    Attributes:
        message: The parsed message.
        tenant: The authenticated tenant.
        deadline_s: Seconds until the client's deadline; None: none.
        context: The dependencies.
        from_gateway: The caller is a trusted gateway.
    """

    message: Any
    tenant: Tenant
    deadline_s: float | None
    context: Context
    from_gateway: bool = False


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a service: `unary` returns one message, `stream` yields many."""

    name: str
    request: type[Message]
    unary: Callable[[RpcCall], Awaitable[Message]] | None = None
    stream: Callable[[RpcCall], AsyncGenerator[Message, None]] | None = None
    level: Level = Level.NORMAL
    budgeted: bool = False


class GrpcDispatcher:
    """Runs methods for clients.

    Messages are parsed here instead of by the library, which reports malformed ones as internal
    errors.
    """

    def __init__(self, context: Context, gate: Gate, path: str) -> None:
        self._context = context
        self._gate = gate
        self._path = path

    def handler(self, method: Method) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler for the gRPC library."""
        if method.stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._streaming(method))
        return grpc.unary_unary_rpc_method_handler(self._unary(method))

    def _unary(self, method: Method) -> Callable[[bytes, Rpc], Awaitable[bytes]]:
        assert method.unary is not None, "checked by the caller"
        answer = method.unary

        async def handle(data: bytes, rpc: Rpc) -> bytes:
            try:
                reply = await answer(self._call(method, data, rpc))
                self._count(method, 200)
                return reply.SerializeToString()
            except SylvanError as error:
                await self._fail(method, rpc, error)

        return handle

    def _streaming(self, method: Method) -> Callable[[bytes, Rpc], AsyncIterator[bytes]]:
        assert method.stream is not None, "checked by the caller"
        answer = method.stream

        async def handle(data: bytes, rpc: Rpc) -> AsyncGenerator[bytes, None]:
            try:
                async with aclosing(answer(self._call(method, data, rpc))) as replies:
                    async for reply in replies:
                        yield reply.SerializeToString()
                self._count(method, 200)
            except SylvanError as error:
                await self._fail(method, rpc, error)

        return handle

    def _call(self, method: Method, data: bytes, rpc: Rpc) -> RpcCall:
        """Authenticate and parse a call.

        Raises:
            RequestError: The call is malformed or not allowed.
            CapacityError: The tenant's budget is spent.
        """
        pairs = rpc.invocation_metadata() or ()
        raw = [(k.encode(), v.encode("latin-1", "replace")) for k, v in pairs if isinstance(v, str)]
        headers = Headers(raw=raw)
        tenant = self._gate.check(method.level, headers)
        if isinstance(tenant, CallRefusal):
            raise RequestError(tenant.message, status=tenant.status)
        named = headers.get(TENANT_KEY)
        from_gateway = trusts_gateway(self._context.settings, self._gate, headers)
        if named and from_gateway:
            tenant = Tenant(name=named)
        if method.budgeted:
            self._context.keyring.admit(tenant)
        message = method.request()
        try:
            message.ParseFromString(data)
        except (DecodeError, ValueError) as error:
            raise RequestError(f"The message is no {method.request.__name__}.") from error
        left_s = rpc.time_remaining()
        if left_s is not None and (left_s <= 0 or math.isinf(left_s)):
            left_s = None if left_s > 0 else 0.001
        arrival = Arrival(
            name=f"{self._path}/{method.name}",
            received_s=self._context.clock(),
            headers=headers,
            peer=rpc.peer(),
        )
        origin = origin_of(self._context.settings.observe, arrival)
        service = replace(self._context.service, origin=origin)
        context = replace(self._context, service=service)
        return RpcCall(message, tenant, left_s, context, from_gateway)

    def _count(self, method: Method, status: int) -> None:
        self._context.accounts.called(f"{self._path}/{method.name}", "GRPC", status)

    async def _fail(self, method: Method, rpc: Rpc, error: SylvanError) -> NoReturn:
        """Abort the call with an error's status; unexpected exceptions are left to the library."""
        status = status_of(error)
        self._count(method, status)
        await rpc.abort(_CODES.get(status, grpc.StatusCode.INTERNAL), str(error))
        raise AssertionError("abort raises")


def status_of(error: SylvanError) -> int:
    """Return the HTTP status of an error."""
    return error.status if isinstance(error, RequestError | CapacityError) else 500
