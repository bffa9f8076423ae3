"""Runs the gRPC server next to HTTP, if enabled."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from sylvan.config.tree import ServerConfig
from sylvan.runtime.server.context import Context


@asynccontextmanager
async def grpc_server(context: Context, server: ServerConfig) -> AsyncGenerator[int | None]:
    """Serve gRPC if `server.grpc_port` is set; yields the port.

    Raises:
        ConfigError: The port or the certificate is unusable.
    """
    if server.grpc_port is None:
        yield None
        return
    from sylvan.runtime.server.grpc.server import GrpcServer  # needs an extra

    async with GrpcServer(context, server) as grpc:
        yield grpc.port
