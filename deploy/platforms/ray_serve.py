"""Ray Serve: replicas of a model, each a Sylvan server of its own behind Ray's proxy.

    pip install "ray[serve]" sylvan
    serve run deploy.platforms.ray_serve:app
    curl http://127.0.0.1:8000/v1/models

Ray starts, restarts and scales the replicas by requests under way; Sylvan batches inside each of
them. The whole HTTP API is there, streams included. Settings come from the environment
(`SYLVAN_...`), MODEL names what is served.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import mkdtemp

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

START_S, STREAM_S = 900.0, 1800.0
OWN = {"host", "content-length", "transfer-encoding", "connection", "keep-alive"}


@serve.deployment(
    ray_actor_options={"num_cpus": 2},
    max_ongoing_requests=256,
    health_check_period_s=10,
    graceful_shutdown_timeout_s=120,
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 16},
)
class Sylvan:
    """One server, on a unix socket of its replica."""

    def __init__(self, model: str) -> None:
        socket = Path(mkdtemp(prefix="sylvan-")) / "s"
        command = [sys.executable, "-m", "sylvan", "serve", model, "--uds", str(socket)]
        # Its standard input is ours: when the replica ends, however, the server does, too.
        self._server = subprocess.Popen([*command, "--until-eof"], stdin=subprocess.PIPE)
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        timeout = httpx.Timeout(STREAM_S, connect=10)
        self._http = httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=timeout
        )
        self._ready = asyncio.create_task(self._until_ready())

    async def check_health(self) -> None:
        """Ray restarts a replica whose server is gone."""
        if self._server.poll() is not None:
            raise RuntimeError(f"the server ended with {self._server.returncode}")

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a call on, and its answer back as it comes."""
        await self._ready
        headers = [(k, v) for k, v in request.headers.items() if k not in OWN]
        path = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = self._http.build_request(
            request.method, path, headers=headers, content=await request.body()
        )
        reply = await self._http.send(asked, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for part in reply.aiter_raw():
                    yield part
            finally:
                await reply.aclose()  # a client that left ends its request

        passed = {k: v for k, v in reply.headers.items() if k not in OWN}
        return StreamingResponse(body(), reply.status_code, passed)

    async def _until_ready(self) -> None:
        async with asyncio.timeout(START_S):
            while True:
                await self.check_health()
                try:
                    if (await self._http.get("/ready")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)


app = Sylvan.bind(os.environ.get("MODEL", "sapling"))
