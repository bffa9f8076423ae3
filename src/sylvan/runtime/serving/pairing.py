"""Prefill-decode disaggregation of a call: where the two servers meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
from pydantic import BaseModel

from sylvan.api.extras import BOOTSTRAP
from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import Bootstrap
from sylvan.runtime.tokenizer.types import GenerateInput

MAX_ROOM = (1 << 63) - 1
MAX_HOST_CHARS = 253
USUAL_PORT = 8998
"""Default bootstrap port of prefill servers."""


class Pairing(msgspec.Struct, frozen=True):
    """The pairing of one call.

    Attributes:
        role: This server's role for it; None: both.
        bootstraps: One, or one per prompt or sample.
        listed: The field that was a list; empty if none was.
        merges: The gateway merges the prefill server's prompt log probabilities into the answer.
    """

    role: Literal["prefill", "decode"] | None = None
    bootstraps: tuple[Bootstrap, ...] = ()
    listed: str = ""
    merges: bool = False

    def placed(self, inputs: Sequence[GenerateInput]) -> Sequence[GenerateInput]:
        """Return the inputs with their rendezvous.

        Raises:
            RequestError: The number of rooms is neither that of the prompts nor of the samples.
        """
        if not self.bootstraps:
            return inputs
        found = self._per_sample(inputs)
        return [
            self._with_bootstraps(inp, tuple(own)) for inp, own in zip(inputs, found, strict=True)
        ]

    def _per_sample(self, inputs: Sequence[GenerateInput]) -> list[list[Bootstrap]]:
        """Return the rooms of each input's samples: given ones, or consecutive numbers."""
        given, counts = self.bootstraps, [inp.sampling.n for inp in inputs]
        if not self.listed:
            given = tuple(_later(given[0], sum(counts[:i])) for i in range(len(inputs)))
        elif len(given) == sum(counts):
            rest = iter(given)
            return [[next(rest) for _ in range(count)] for count in counts]
        if len(given) != len(inputs):
            raise RequestError(
                f"{self.listed}: {len(given)} given for {len(inputs)} prompts.",
                param=self.listed,
            )
        return [
            [_later(first, i) for i in range(count)]
            for first, count in zip(given, counts, strict=True)
        ]

    def _with_bootstraps(
        self, inp: GenerateInput, bootstraps: tuple[Bootstrap, ...]
    ) -> GenerateInput:
        reads_prompt = inp.logprobs is not None and inp.logprobs.start is not None
        if reads_prompt and not self.merges:
            return inp  # only a server with both roles can report both
        if inp.media:
            return inp  # no identity to compare: each server computes it alone
        if self.role == "prefill":
            sampling = inp.sampling
            wanted = sampling.max_new_tokens
            first_only = msgspec.structs.replace(
                sampling,
                max_new_tokens=1 if wanted is None else min(1, wanted),
                min_new_tokens=min(1, sampling.min_new_tokens),
            )
            return msgspec.structs.replace(inp, sampling=first_only, bootstraps=bootstraps)
        if reads_prompt and inp.logprobs is not None:
            logprobs = msgspec.structs.replace(inp.logprobs, start=None)
            inp = msgspec.structs.replace(inp, logprobs=logprobs)
        return msgspec.structs.replace(inp, bootstraps=bootstraps)


@dataclass(slots=True)
class Role:
    """This server's role for calls with a room.

    Attributes:
        current: None: both, even for those.
        switches: Whether operators may change it at run time.
    """

    current: Literal["prefill", "decode"] | None = None
    switches: bool = False


def read_pairing(body: BaseModel, path: str, role: Role) -> Pairing:
    """Read where the two servers of a call meet.

    Raises:
        RequestError: A field is malformed; the message names it.
    """
    given = body.model_extra or {}
    if role.current is None or given.get("bootstrap_room") is None:
        return Pairing()
    lists = [name for name in BOOTSTRAP if isinstance(given.get(name), list)]
    count = len(given[lists[0]]) if lists else 1
    if any(len(given[name]) != count for name in lists):
        raise RequestError(f"{lists[0]}: lists of different lengths.", param=lists[0])
    rows = [_row(given, i) for i in range(count)]
    rows = [msgspec.structs.replace(row, role=role.current) for row in rows]
    if lists and "bootstrap_room" not in lists:
        rows = [_later(row, i) for i, row in enumerate(rows)]
    return Pairing(role.current, tuple(rows), lists[0] if lists else "", path == "/generate")


def _row(given: Mapping[str, Any], index: int) -> Bootstrap:
    host, port, room = (_item(given.get(name), index) for name in BOOTSTRAP)
    if not isinstance(host, str) or not 0 < len(host) <= MAX_HOST_CHARS:
        message = f"bootstrap_host: a host name of up to {MAX_HOST_CHARS} characters is needed."
        raise RequestError(message, param="bootstrap_host")
    port = USUAL_PORT if port is None else port
    if type(port) is not int or not 0 < port < 65536:
        raise RequestError("bootstrap_port: must be 1 to 65535.", param="bootstrap_port")
    if type(room) is not int or not 0 <= room <= MAX_ROOM:
        message = "bootstrap_room: must be a number from 0 to 2**63 - 1."
        raise RequestError(message, param="bootstrap_room")
    return Bootstrap(host, port, room)


def _item(value: Any, index: int) -> Any:
    return cast("list[Any]", value)[index] if isinstance(value, list) else value


def _later(first: Bootstrap, by: int) -> Bootstrap:
    return msgspec.structs.replace(first, room=(first.room + by) & MAX_ROOM)
