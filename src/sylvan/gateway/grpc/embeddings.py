"""`/v1/embeddings` with gRPC workers: one call per text."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from sylvan.api.openai.vectors import EmbeddingsBody
from sylvan.api.validation import parse
from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.grpc.bodies.common import check_passed
from sylvan.gateway.grpc.context import EMBEDDINGS, RequestInput
from sylvan.gateway.grpc.metadata import metadata_of
from sylvan.gateway.http.attempts import Attempts
from sylvan.gateway.placement import RequestPlacer
from sylvan.gateway.policies.api import PlacementOutcome, RoutingRequest
from sylvan.gateway.text.library import TextLibrary
from sylvan.gateway.upstream.grpc import GrpcUpstream
from sylvan.gateway.workers.grpc_probe import GrpcProbe
from sylvan.gateway.workers.registry import Registry
from sylvan.protocol.errors import RequestError
from sylvan.protocol.journal import Totals
from sylvan.rpc import scheduler_pb2 as pb

PARALLEL = 32
"""Texts of one request that are computed concurrently."""
_PASSED = frozenset({"input", "model", "encoding_format", "user"})
_NEUTRAL: Sequence[object] = (None, "", 0)


class GrpcEmbeddings:
    """Embeds texts, each on the worker that the policy selects, with retries on other workers.

    Args:
        registry: All workers.
        placing: Selects workers.
        library: Text processing of their models.
        upstream: Channels to them.
        probe: Knows the keys of workers.
        attempts: Makes the record of failed attempts.
        timeout_s: Time limit of one text.
    """

    def __init__(
        self,
        registry: Registry,
        placing: RequestPlacer,
        library: TextLibrary,
        calls: tuple[GrpcUpstream, GrpcProbe],
        attempts: Callable[[str], Attempts],
        timeout_s: float,
    ) -> None:
        self._registry = registry
        self._placing = placing
        self._library = library
        self._upstream, self._probe = calls
        self._attempts = attempts
        self._timeout_s = timeout_s

    async def serve(self, given: RequestInput) -> Totals:
        """Answer one request; return its token count.

        Raises:
            RequestError: The request is invalid; the message names the field.
            CapacityError: No worker can take the request now.
        """
        body = parse(EmbeddingsBody, given.asked.fields)
        check_passed(body, _PASSED, _NEUTRAL)
        prompts = await self._prompts(given, body)
        slots = asyncio.Semaphore(PARALLEL)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(given, ids, slots)) for ids in prompts]
        replies = [task.result() for task in tasks]
        tokens = sum(reply.prompt_tokens for reply in replies)
        data = [
            {"object": "embedding", "index": i, "embedding": _written(reply, body)}
            for i, reply in enumerate(replies)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        model = body.model or next(iter(self._registry.models), "default")
        given.meter.first_byte()
        await given.caller.reply_json(
            {"object": "list", "data": data, "model": model, "usage": usage}
        )
        return Totals(prompt_tokens=tokens)

    async def _prompts(self, given: RequestInput, body: EmbeddingsBody) -> Sequence[Sequence[int]]:
        workers = self._registry.candidates(given.asked.model, connection="grpc")
        text = await self._library.of_any(workers)
        value: Any = body.input
        many: list[str | list[int]] = [value] if isinstance(value, str) or _is_ids(value) else value
        if not many or any(not one for one in many):
            raise RequestError("input must not be empty.", param="input")
        return [await text.ids.of(one) if isinstance(one, str) else one for one in many]

    async def _one(
        self, given: RequestInput, ids: Sequence[int], slots: asyncio.Semaphore
    ) -> pb.EmbedResponse:
        attempts = self._attempts(EMBEDDINGS)
        async with slots:
            while True:
                try:
                    return await self._try(given, ids, attempts)
                except UpstreamError:
                    if not await attempts.another("regular"):
                        raise

    async def _try(
        self, given: RequestInput, ids: Sequence[int], attempts: Attempts
    ) -> pb.EmbedResponse:
        caller, asked = given.caller, given.asked
        request = RoutingRequest(
            prompt=array("i", ids).tobytes(),
            namespace=f"{caller.tenant}/{asked.namespace}",
            key=caller.headers.get("x-smg-routing-key", ""),
            token_ids=ids,
        )
        placed = self._placing.place(asked.model, request, connection="grpc", avoid=attempts.avoid)
        dispatch = placed.worker.begin(placed.placement.new_tokens)
        success = False
        try:
            reply = await self._upstream.call(
                placed.worker.spec.url,
                "Embed",
                pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=ids)),
                pb.EmbedResponse,
                metadata_of(self._probe, placed.worker, caller),
                self._timeout_s,
            )
            dispatch.succeeded()
            success = True
        except UpstreamError as error:
            attempts.blame(placed.worker, dispatch, error)
            raise
        finally:
            dispatch.close()
            placed.completed(PlacementOutcome(success=success))
        return reply


def _is_ids(value: Any) -> bool:
    """Whether an input is one text given as token IDs."""
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return bool(items) and isinstance(items[0], int)


def _written(reply: pb.EmbedResponse, body: EmbeddingsBody) -> list[float] | str:
    if body.encoding_format == "base64":
        data = np.array(reply.embedding, "<f4").tobytes()
        return base64.b64encode(data).decode("ascii")
    return list(reply.embedding)
