"""gRPC requests to workers, with all failures mapped to one error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import Message

from sylvan.config.route import WorkersConfig
from sylvan.gateway.errors import UpstreamError
from sylvan.protocol.errors import RequestError
from sylvan.rpc import common_pb2 as common
from sylvan.rpc import scheduler_pb2 as pb

Reply = TypeVar("Reply", bound=Message)
Metadata = Sequence[tuple[str, str]]

SERVICE: str = pb.DESCRIPTOR.services_by_name["SglangScheduler"].full_name
MAX_TOKENIZER_BYTES = 512 << 20
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
_CLIENT_FAULTS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.ALREADY_EXISTS: 409,
}
_OVERLOADS = {grpc.StatusCode.RESOURCE_EXHAUSTED: 429, grpc.StatusCode.UNAVAILABLE: 503}


@dataclass(frozen=True, slots=True)
class CallWatch:
    """How a silent call is watched.

    Attributes:
        stall_s: Seconds of silence after which the worker is probed.
        is_alive: Probes the worker.
    """

    stall_s: float
    is_alive: Callable[[], Awaitable[bool]]

    async def over(self, reading: Coroutine[Any, Any, Any]) -> Any:
        """Await a read, however long it takes, while the worker is alive.

        Raises:
            TimeoutError: The worker is not alive.
        """
        task = asyncio.ensure_future(reading)
        try:
            while True:
                await asyncio.wait((task,), timeout=self.stall_s)
                if task.done():
                    return task.result()
                if not await self.is_alive() and not task.done():
                    raise TimeoutError
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


class GrpcUpstream:
    """Keeps a channel to each worker; belongs to one event loop. Use it as an async context."""

    def __init__(self, config: WorkersConfig) -> None:
        self._config = config
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> GrpcUpstream:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def forget(self, url: str) -> None:
        """Close the channel to a removed worker."""
        channel = self._channels.pop(url, None)
        if channel is not None:
            await channel.close()

    async def call(
        self,
        url: str,
        method: str,
        request: Message,
        reply: type[Reply],
        metadata: Metadata,
        timeout_s: float,
    ) -> Reply:
        """Make a unary call.

        Raises:
            UpstreamError: The worker is unreachable, or fails.
            RequestError: The worker rejects the request.
        """
        stub: Any = self._channel(url).unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        with _explained():
            return await stub(request, metadata=list(metadata), timeout=timeout_s)

    async def generate(
        self,
        url: str,
        request: pb.GenerateRequest,
        metadata: Metadata,
        watch: CallWatch,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yield the replies to `Generate`; closing the iterator cancels the request.

        Args:
            url: Address of the worker.
            request: The message.
            metadata: Metadata of the call.
            watch: How the call is watched while it is silent.

        Raises:
            UpstreamError: The worker is lost, or fails.
            RequestError: The worker rejects the request.
        """
        stub: Any = self._channel(url).unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        call: Any = stub(request, metadata=list(metadata))
        try:
            while True:
                with _explained(watch.stall_s):
                    reply = await watch.over(call.read())
                if reply is grpc.aio.EOF:
                    return
                yield reply
        finally:
            call.cancel()

    async def tokenizer(self, url: str, metadata: Metadata, timeout_s: float) -> tuple[bytes, str]:
        """Download the worker's tokenizer as a ZIP archive, with its SHA-256.

        Raises:
            UpstreamError: The worker does not provide it, or it is too large.
        """
        stub: Any = self._channel(url).unary_stream(
            f"/{SERVICE}/GetTokenizer",
            request_serializer=common.GetTokenizerRequest.SerializeToString,
            response_deserializer=common.GetTokenizerChunk.FromString,
        )
        data, digest = bytearray(), ""
        try:
            with _explained(timeout_s):
                call: Any = stub(
                    common.GetTokenizerRequest(), metadata=list(metadata), timeout=timeout_s
                )
                async for chunk in call:
                    data += chunk.data
                    digest = chunk.sha256 or digest
                    if len(data) > MAX_TOKENIZER_BYTES:
                        raise UpstreamError("The tokenizer is too large.", kind="protocol")
        except RequestError as error:
            raise UpstreamError(str(error), kind="protocol") from error
        return bytes(data), digest

    def _channel(self, url: str) -> grpc.aio.Channel:
        channel = self._channels.get(url)
        if channel is None:
            parts = urlsplit(url)
            if parts.scheme == "grpcs":
                credentials = self._credentials()
                channel = grpc.aio.secure_channel(parts.netloc, credentials, options=_OPTIONS)
            else:
                channel = grpc.aio.insecure_channel(parts.netloc, options=_OPTIONS)
            self._channels[url] = channel
        return channel

    def _credentials(self) -> grpc.ChannelCredentials:
        config = self._config
        roots = [Path(name).read_bytes() for name in config.ca_certfiles]
        pair = None, None
        if config.client_keyfile is not None and config.client_certfile is not None:
            files = config.client_keyfile, config.client_certfile
            pair = Path(files[0]).read_bytes(), Path(files[1]).read_bytes()
        return grpc.ssl_channel_credentials(b"\n".join(roots) if roots else None, *pair)


@contextmanager
def _explained(seconds: float = 0.0) -> Generator[None]:
    """Map errors of the library to ours; `seconds` is the time waited."""
    try:
        yield
    except TimeoutError as error:
        message = f"The worker sent nothing for {seconds:g} s."
        raise UpstreamError(message, kind="stall", status=504) from error
    except grpc.aio.UsageError as error:
        raise UpstreamError("The connection to the worker was closed.", kind="closed") from error
    except grpc.aio.AioRpcError as error:
        raise _error_of(error.code(), error.details() or "") from error


def _error_of(code: grpc.StatusCode, details: str) -> UpstreamError | RequestError:
    if code in _CLIENT_FAULTS:
        return RequestError(details[:2000], status=_CLIENT_FAULTS[code])
    if code in _OVERLOADS:
        lost = code is grpc.StatusCode.UNAVAILABLE
        reached = "connect" not in details.lower()
        kind = "status" if not lost else "closed" if reached else "connect"
        return UpstreamError(f"The worker: {details[:500]}", kind=kind, status=_OVERLOADS[code])
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return UpstreamError("The worker did not answer in time.", kind="stall", status=504)
    message = f"The worker failed ({code.name}): {details[:500]}"
    return UpstreamError(message, kind="status")
