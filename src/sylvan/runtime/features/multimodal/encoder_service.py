"""The service of an encoder server (`media.encoder_only`), for servers without an encoder."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import torch

from sylvan.config.media import MediaConfig
from sylvan.media.messages import EncodeItem, PreparedItem
from sylvan.media.pool import MediaWorkers
from sylvan.media.precomputed import VECTORS
from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.protocol.media import MediaKind
from sylvan.runtime.executor.failures import FAILURES
from sylvan.runtime.features.multimodal.encoder import MediaEncoder
from sylvan.utils.threads import call_in_pool

_HERE = "item"


class EncoderService:
    """Prepares and encodes items, each once; caches the newest.

    Args:
        workers: Workers that prepare items.
        encoder: Encodes items.
        settings: Limits, in addition to those of a request.
        max_items: Most items in progress or waiting.
    """

    def __init__(
        self, workers: MediaWorkers, encoder: MediaEncoder, settings: MediaConfig, max_items: int
    ) -> None:
        self._workers, self._encoder, self._settings = workers, encoder, settings
        self._max_items = max_items
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._kept: OrderedDict[bytes, PreparedItem] = OrderedDict()
        self._kept_bytes = 0
        self._running: dict[bytes, asyncio.Task[PreparedItem]] = {}
        self.encoded = self.reused = 0

    async def encode(self, request: EncodeItem) -> PreparedItem:
        """Return an item's tokens and vectors, float32 (layers, N, D); or the error.

        Raises:
            CapacityError: Too many items wait.
        """
        key = _key(request)
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            self.reused += 1
            return known
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= self._max_items:
                raise CapacityError(f"{len(self._running)} items are being encoded")
            task = self._running[key] = asyncio.create_task(self._encode(key, request))
            task.add_done_callback(lambda _: self._running.pop(key, None))
        else:
            self.reused += 1
        return await asyncio.shield(task)  # others may wait for it

    async def close(self) -> None:
        """Stop the processes and the thread."""
        for task in tuple(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._workers.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, key: bytes, order: EncodeItem) -> PreparedItem:
        settings, item = self._settings, order.item
        item = msgspec.structs.replace(
            item,
            max_pixels=min(item.max_pixels, settings.pixels),
            max_frames=min(item.max_frames, settings.frames),
            max_seconds=min(item.max_seconds, settings.seconds),
        )
        try:
            prepared = await self._workers.prepare(item, _HERE)
        except RequestError as error:
            why = str(error).removeprefix(f"{_HERE}: ").rstrip(".")
            return PreparedItem(id=item.id, error=why)
        try:
            vectors = await call_in_pool(self._thread, self._run, item.kind, prepared)
        except FAILURES as error:
            return PreparedItem(id=item.id, error=f"the {item.kind} cannot be encoded: {error}")
        self.encoded += 1
        made = msgspec.structs.replace(prepared, features={VECTORS: vectors})
        self._kept[key] = made
        self._kept_bytes += vectors.nbytes
        while self._kept_bytes > self._settings.vector_bytes:
            _, old = self._kept.popitem(last=False)
            self._kept_bytes -= old.features[VECTORS].nbytes
        return made

    def _run(self, kind: MediaKind, prepared: PreparedItem) -> np.ndarray:
        with torch.inference_mode():
            layers = self._encoder.encode(kind, prepared.features)
            return np.stack([vectors.float().numpy() for vectors in layers])


def _key(request: EncodeItem) -> bytes:
    item = request.item
    found = hashlib.sha256(f"{item.kind}|{request.scope}|".encode())
    limits = item.options, item.max_pixels, item.max_frames, item.max_seconds
    found.update(msgspec.json.encode(limits, order="sorted"))
    found.update(item.data)
    return found.digest()


class NoEncoder:
    """Placeholder encoder of a server without one: embeddings come from an encoder server."""

    def encode(self, kind: MediaKind, features: Mapping[str, np.ndarray]) -> list[torch.Tensor]:
        """Not supported.

        Raises:
            ValueError: Always.
        """
        raise ValueError("this server has no encoder")
