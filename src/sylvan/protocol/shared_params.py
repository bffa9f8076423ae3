"""Sends sampling parameters that many requests share to the scheduler only once.

A grammar may take megabytes, and a body may contain thousands of prompts, each one a request.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sylvan.protocol.messages import Params, Submit, ToScheduler
from sylvan.protocol.requests import GenerateRequest, Request
from sylvan.protocol.sampling import SamplingParams

SLOTS = 4
MIN_CHARS = 1024
_TEXTS = ("json_schema", "regex", "ebnf", "structural_tag")
_COLLECTIONS = ("stop", "stop_token_ids", "stop_regex", "choice", "logit_bias", "custom_params")


class ParamsSender:
    """Sends large sampling parameters ahead of the first request that has them.

    Args:
        send: Sends a message; messages must arrive in order.
    """

    def __init__(self, send: Callable[[ToScheduler], None]) -> None:
        self._send = send
        self._kept: list[SamplingParams | None] = [None] * SLOTS
        self._next = 0

    def send(self, message: ToScheduler) -> None:
        """Send a message; see `MessageSender.send`."""
        if isinstance(message, Submit) and isinstance(message.request, GenerateRequest):
            message = self._shortened(message, message.request)
        self._send(message)

    def _shortened(self, message: Submit, request: GenerateRequest) -> Submit:
        sampling = request.sampling
        if not _is_large(sampling):
            return message
        common = msgspec.structs.replace(sampling, max_new_tokens=None, sampling_seed=None)
        if common in self._kept:  # requests of one body share the object, so comparing is fast
            slot = self._kept.index(common)
        else:
            slot, self._next = self._next, (self._next + 1) % SLOTS
            self._kept[slot] = None
            self._send(Params(slot=slot, sampling=common))
            self._kept[slot] = common
        own = SamplingParams(
            max_new_tokens=sampling.max_new_tokens, sampling_seed=sampling.sampling_seed
        )
        short = msgspec.structs.replace(request, sampling=own)
        return Submit(request=short, params=slot)


class ParamsReceiver:
    """Restores the parameters that a `ParamsSender` split off."""

    def __init__(self) -> None:
        self._kept: dict[int, SamplingParams] = {}

    def keep(self, message: Params) -> None:
        """Store parameters of later requests."""
        self._kept[message.slot] = message.sampling

    def request(self, message: Submit) -> Request:
        """Return the complete request.

        Raises:
            KeyError: the parameters of its slot have not arrived.
        """
        request = message.request
        if message.params is None or not isinstance(request, GenerateRequest):
            return request
        own = request.sampling
        sampling = msgspec.structs.replace(
            self._kept[message.params],
            max_new_tokens=own.max_new_tokens,
            sampling_seed=own.sampling_seed,
        )
        return msgspec.structs.replace(request, sampling=sampling)


def _is_large(sampling: SamplingParams) -> bool:
    if any(getattr(sampling, name) for name in _COLLECTIONS):
        return True
    return any(len(getattr(sampling, name) or "") >= MIN_CHARS for name in _TEXTS)
