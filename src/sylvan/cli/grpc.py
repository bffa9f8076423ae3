"""gRPC beside HTTP, where it is asked for."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from sylvan.config.tree import ServerConfig
from sylvan.runtime.server.context import Context


@asynccontextmanager
async def grpc_server(context: Context, server: ServerConfig) -> AsyncGenerator[int | None]:
    """Serve gRPC if `server.grpc_port` is given; gives the port.

    Raises:
        ConfigError: The port or the certificate cannot be used.
    """
    if server.grpc_port is None:
        yield None
        return
    from sylvan.runtime.server.grpc.serving import GrpcServer  # needs an extra

    async with GrpcServer(context, server) as grpc:
        yield grpc.port
