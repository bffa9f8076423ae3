"""The gRPC server, next to HTTP."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_reflection.v1alpha import reflection

from sylvan.config.tree import ServerConfig
from sylvan.protocol.errors import ConfigError
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.grpc.calls import GrpcDispatcher
from sylvan.runtime.server.grpc.health import NAME as HEALTH
from sylvan.runtime.server.grpc.health import health_methods
from sylvan.runtime.server.grpc.service import METHODS
from sylvan.runtime.server.security import Gate

SERVICE: str = pb.DESCRIPTOR.services_by_name["SglangScheduler"].full_name
CLOSE_S = 5.0
MAX_CALLS = 16384
MAX_METADATA_BYTES = 64 << 10


class GrpcServer:
    """Scheduler service, health and reflection on one port; use it as an async context manager.

    Belongs to one event loop. On exit, calls may finish for `CLOSE_S`, then are cancelled.

    Args:
        context: The dependencies, shared with HTTP.
        server: Listening address and certificates.

    Attributes:
        port: The listening port.

    Raises:
        ConfigError: The port is taken, or a certificate is unusable.
    """

    def __init__(self, context: Context, server: ServerConfig) -> None:
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", server.max_body_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.so_reuseport", 0),
            ),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        gate = Gate(context.current, context.keyring)
        services = {SERVICE: METHODS, HEALTH: health_methods([SERVICE])}
        for name, methods in services.items():
            caller = GrpcDispatcher(context, gate, f"/{name}")
            handlers = {method.name: caller.handler(method) for method in methods}
            generic = grpc.method_handlers_generic_handler(name, handlers)
            self._server.add_generic_rpc_handlers((generic,))
        reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), self._server)
        self.port = self._bind(server)

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._server.stop(CLOSE_S)

    def _bind(self, server: ServerConfig) -> int:
        host = f"[{server.host}]" if ":" in server.host else server.host
        address = f"{host}:{server.grpc_port}"
        credentials = _credentials(server)
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            message = f"server.grpc_port: cannot listen on {address}; it may be taken"
            raise ConfigError(message) from error


def _credentials(server: ServerConfig) -> grpc.ServerCredentials | None:
    if server.ssl_certfile is None:
        return None
    if server.ssl_keyfile is None or server.ssl_keyfile_password is not None:
        message = "server.grpc_port: with TLS it needs server.ssl_keyfile, without a password"
        raise ConfigError(message)
    try:
        with open(server.ssl_keyfile, "rb") as key, open(server.ssl_certfile, "rb") as chain:
            pair = (key.read(), chain.read())
        roots = Path(server.ssl_ca_certs).read_bytes() if server.ssl_ca_certs else None
    except OSError as error:
        names = "server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs"
        raise ConfigError(f"{names}: {error}") from error
    return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)
