"""Both ends of a KV transfer in one process, and a network that loses, delays and reorders
messages.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sylvan.runtime.features.disagg.channel import Buffer, Channel, ChannelError, Place, Serve
from sylvan.runtime.features.disagg.tcp import TcpNetwork
from sylvan.runtime.pool.pages import PagedBuffer
from sylvan.runtime.pool.state_pages import StatePages
from sylvan.runtime.storage.manifest import GroupLayout, Manifest

PAGE = 16


@dataclass
class Faults:
    """Probabilities of message faults, or the number of the message that `breaks_at`.

    `lost`: it never arrives, and the connection stays; `broken`: the connection breaks; `late`: it
    arrives up to `delay_s` later; `swapped`: the next one overtakes it; `garbled`: one byte
    changes.
    """

    seed: int = 0
    lost: float = 0.0
    broken: float = 0.0
    late: float = 0.0
    swapped: float = 0.0
    garbled: float = 0.0
    delay_s: float = 0.02
    breaks_at: int | None = None
    sent: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def falls(self, probability: float) -> bool:
        return self.random.random() < probability


class FaultyChannel:
    """Passes messages to another channel, with faults."""

    def __init__(self, inner: Channel, faults: Faults) -> None:
        self._inner, self._faults = inner, faults
        self._held: tuple[bytes, Sequence[Buffer]] | None = None

    @property
    def same_machine(self) -> bool:
        return self._inner.same_machine

    async def send(self, message: bytes, payload: Sequence[Buffer] = ()) -> None:
        faults = self._faults
        number, faults.sent = faults.sent, faults.sent + 1
        if number == faults.breaks_at or faults.falls(faults.broken):
            self._inner.close()
            raise ChannelError("the connection broke: a fault")
        if faults.falls(faults.lost):
            return
        if faults.falls(faults.late):
            await asyncio.sleep(faults.random.random() * faults.delay_s)
        if faults.falls(faults.garbled):
            payload, message = _garbled(payload, message, faults.random)
        held, self._held = self._held, None
        if held is None and faults.falls(faults.swapped):
            self._held = message, [part.copy() for part in payload]
            return
        await self._inner.send(message, payload)
        if held is not None:
            await self._inner.send(*held)

    async def receive(
        self, most: int = 0, place: Place | None = None
    ) -> tuple[bytes, Sequence[Buffer]]:
        return await self._inner.receive(most, place)

    def close(self) -> None:
        self._inner.close()


def _garbled(
    payload: Sequence[Buffer], message: bytes, rng: random.Random
) -> tuple[Sequence[Buffer], bytes]:
    if payload:
        whole = np.concatenate(payload)
        whole[rng.randrange(whole.nbytes)] ^= 1 << rng.randrange(8)
        return [whole], message
    changed = bytearray(message)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return payload, bytes(changed)


class FaultyNetwork:
    """TCP with faults."""

    def __init__(self, faults: Faults) -> None:
        self._inner, self._faults = TcpNetwork(), faults

    async def listen(self, host: str, port: int, serve: Serve) -> int:
        async def serve_faulty(channel: Channel) -> None:
            await serve(FaultyChannel(channel, self._faults))

        return await self._inner.listen(host, port, serve_faulty)

    async def connect(self, host: str, port: int) -> Channel:
        return FaultyChannel(await self._inner.connect(host, port), self._faults)

    def close(self) -> None:
        self._inner.close()


def paged(num_pages: int, seed: int, *, regions: int = 3, width: int = 96) -> PagedBuffer:
    """Return pages full of numbers."""
    torch.manual_seed(seed)
    whole = torch.randint(0, 256, (regions, num_pages, width), dtype=torch.uint8)
    return PagedBuffer(whole, PAGE)


def states(num_slots: int, seed: int) -> StatePages:
    """Return slots full of numbers."""
    torch.manual_seed(seed)
    return StatePages([torch.randn(num_slots, 5), torch.randn(num_slots, 2, 3)])


def content(memory: Any, pages: Sequence[int]) -> bytes:
    """Return the bytes of pages, concatenated."""
    buffer = memory.host_buffer(len(pages))
    memory.export(np.array(pages, np.int32), buffer).wait()
    return buffer[: len(pages) * memory.page_bytes].tobytes()


def manifest(**changes: Any) -> Manifest:
    """Return the manifest of a small model."""
    given: dict[str, Any] = {
        "version": "1",
        "weights": "w",
        "tokenizer": "t",
        "dtype": "float32",
        "quantization": "none",
        "kv_dtype": "model",
        "runner": "eager",
        "attention": "torch",
        "context_len": 64,
        "page_size": PAGE,
        "groups": (GroupLayout("full", "full", 288),),
    }
    return Manifest(**{**given, **changes})


def until(ask: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    """Return the first result of `ask` that is not None."""
    deadline = time.monotonic() + seconds
    while not (found := ask()):
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)
    return found
