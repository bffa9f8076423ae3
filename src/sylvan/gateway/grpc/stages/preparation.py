"""Stage 1: turns the body into token IDs, sampling parameters and an answer format."""

from __future__ import annotations

from sylvan.gateway.grpc.bodies import chat, completion, native
from sylvan.gateway.grpc.bodies.common import EventHeader
from sylvan.gateway.grpc.context import EMBEDDINGS, RequestContext
from sylvan.gateway.grpc.samples import RelayedSample
from sylvan.gateway.text.library import TextLibrary
from sylvan.gateway.workers.registry import Registry
from sylvan.protocol.errors import RequestError
from sylvan.utils.clock import Clock

READERS = {
    "/v1/chat/completions": chat.prepare,
    "/v1/completions": completion.prepare,
    "/generate": native.prepare,
}


class Preparation:
    """Renders and tokenises the prompt, and selects how the answer is parsed.

    Args:
        registry: All workers.
        library: Text processing of their models.
        wall: Wall clock, in seconds since the Unix epoch.
    """

    name = "preparation"

    def __init__(self, registry: Registry, library: TextLibrary, wall: Clock) -> None:
        self._registry = registry
        self._library = library
        self._wall = wall

    async def run(self, context: RequestContext) -> None:
        given = context.input
        read = READERS.get(given.route.path)
        if read is None:
            served = ", ".join((*READERS, EMBEDDINGS))
            message = f"{given.route.path} is not served by workers that speak gRPC; {served} are."
            raise RequestError(message, status=501)
        model = self._registry.known_model(given.parsed.model)
        kind = self._registry.single_kind(given.parsed.model, "grpc")
        workers = self._registry.candidates(given.parsed.model, kind, "grpc")
        text = await self._library.of_any(workers)
        shown = given.parsed.model or next(iter(workers[0].models), "default")
        prepared = await read(given, text, model, EventHeader(shown, int(self._wall())))
        wanted = prepared.logprobs
        if kind == "prefill" and wanted is not None and wanted.start is not None:
            message = "logprob_start_len is not served by pairs of workers that speak gRPC."
            raise RequestError(message, param="logprob_start_len", status=501)
        context.state.prepared = prepared
        context.state.samples = [RelayedSample(prepared) for _ in range(prepared.sampling.n)]
