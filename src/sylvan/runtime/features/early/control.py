"""Control half of an early start: gates requests that need PyTorch."""

from __future__ import annotations

from typing import ClassVar

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import Req
from sylvan.runtime.executor.early.executor import EarlyExecutor
from sylvan.runtime.executor.early.needs import needs_torch
from sylvan.runtime.sched.capability import Capability, Verdict


class WholeExecutor(Capability):
    """Builds the full executor, with PyTorch, for the first request that needs it."""

    name: ClassVar = "whole-executor"

    def __init__(self, executor: EarlyExecutor) -> None:
        self._executor = executor

    def on_arrival(self, req: Req) -> None:
        if isinstance(req.request, GenerateRequest) and needs_torch(req.request):
            self._executor.prepare()  # while a grammar is compiled

    def gate(self, req: Req) -> Verdict:
        """See `Capability.gate`.

        Raises:
            RequestError: PyTorch cannot be used.
        """
        if self._executor.whole or not needs_torch(req.request):
            return Verdict.READY
        self._executor.prepare()
        if self._executor.failure:
            message = f"PyTorch is needed, and cannot be used: {self._executor.failure}"
            raise RequestError(message, status=500)
        return Verdict.WAIT
