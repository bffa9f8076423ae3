"""The prefill worker of a request under prefill-decode disaggregation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.http.pairs.bootstrap import new_rendezvous
from sylvan.gateway.placement import PlacedRequest
from sylvan.gateway.policies.api import PlacementOutcome
from sylvan.rpc import scheduler_pb2 as pb

MAX_ROOM = (1 << 31) - (1 << 16)
"""Bootstrap rooms have 31 bits in this protocol."""
BOOTSTRAP_PORT = 8998
"""Default bootstrap port of prefill workers."""


class Prefill:
    """The prefill half of a request; counts against its worker until it is closed.

    Attributes:
        worker: The prefill worker.
        dispatch: The request, as counted against the worker.
        error: Why the worker failed.
    """

    def __init__(self, placed: PlacedRequest) -> None:
        self.worker = placed.worker
        self.dispatch = placed.worker.begin(placed.placement.new_tokens)
        self.error: UpstreamError | None = None
        self._placed = placed
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    def meeting(self) -> pb.DisaggregatedParams:
        """Return the rendezvous of both workers."""
        made = new_rendezvous(self.worker, MAX_ROOM)
        return pb.DisaggregatedParams(
            bootstrap_host=made.host,
            bootstrap_port=made.port or BOOTSTRAP_PORT,
            bootstrap_room=made.room,
        )

    def begin(self, replies: AsyncGenerator[pb.GenerateResponse, None]) -> asyncio.Task[None]:
        """Start reading the worker's replies and drop them; the task fails with the call."""
        self._task = asyncio.get_running_loop().create_task(self._drain(replies))
        self._task.add_done_callback(_retrieve_exception)
        return self._task

    def close(self) -> None:
        """Release the worker: the request finished, or another pair is tried."""
        if self._task is not None:
            self._task.cancel()
        if self._ended:
            self.dispatch.succeeded()
        self.dispatch.close()
        self._placed.completed(PlacementOutcome(success=self._ended))

    async def _drain(self, replies: AsyncGenerator[pb.GenerateResponse, None]) -> None:
        try:
            async with aclosing(replies):
                async for _ in replies:
                    self.dispatch.answered()
            self._ended = True
        except UpstreamError as error:
            self.error = error
            raise


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieve the task's exception, so that asyncio does not log it as unhandled."""
    if not task.cancelled():
        task.exception()
