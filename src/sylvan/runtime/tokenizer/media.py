"""Prepares the images, videos and audio of requests as items of a prompt."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sylvan.config.media import MediaConfig
from sylvan.media.documents import PAGES
from sylvan.media.fetch import Fetcher, FetchLimits
from sylvan.media.messages import PreparedItem, PrepareItem
from sylvan.media.pool import MediaWorkers
from sylvan.media.precomputed import VECTORS, given_vectors
from sylvan.media.published import COUNT, MANY, NUMBER, is_counted
from sylvan.media.remote import RemoteEncoders
from sylvan.media.sounds import SAMPLES
from sylvan.media.source import MediaSource
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import RequestError
from sylvan.protocol.media import MEDIA_KINDS, MediaItem, MediaKind, listed

_KEPT_BYTES = 256 << 20  # size of prepared items kept for later requests


class MediaPreparer:
    """Fetches, decodes and prepares items off the event loop, each of them once.

    Args:
        model_dir: Checkpoint whose processor is used.
        settings: Limits.
    """

    def __init__(self, model_dir: Path, settings: MediaConfig) -> None:
        self._settings = settings
        self._fetcher = Fetcher(
            FetchLimits(
                fetch=settings.fetch,
                allowed_hosts=settings.allowed_hosts,
                allowed_dirs=settings.allowed_dirs,
                item_bytes=settings.item_bytes,
                fetch_s=settings.fetch_s,
            )
        )
        self._workers = MediaWorkers(model_dir, settings.workers, settings.process_s)
        self._remote: RemoteEncoders | None = None
        if settings.encoder_urls:
            urls, key = settings.encoder_urls, settings.encoder_key
            self._remote = RemoteEncoders(urls, key, settings.process_s)
        self._counts = is_counted(model_dir)
        self._kept: OrderedDict[bytes, PreparedItem] = OrderedDict()
        self._kept_bytes = 0

    async def expand(
        self,
        input_ids: Sequence[int] | IntArray,
        sources: Sequence[MediaSource],
        token_ids: Mapping[MediaKind, int],
        tenant: str,
    ) -> tuple[IntArray, tuple[MediaItem, ...]]:
        """Expand each placeholder of a prompt to the tokens of its item.

        Args:
            input_ids: A prompt with one placeholder per item, in order.
            sources: The items.
            token_ids: Placeholder tokens, by media kind.
            tenant: Tenant; items are not shared between tenants.

        Raises:
            RequestError: An item cannot be fetched or prepared, or the number of placeholders
                differs.
        """
        ids = np.asarray(input_ids, np.int32)
        if len(sources) > self._settings.items:
            raise RequestError(
                f"{sources[0].path}: {len(sources)} items are more than this server takes in a "
                f"request, {self._settings.items} (media.items).",
                param=sources[0].path,
            )
        _check_kinds(sources, token_ids)
        sources = self._numbered(sources)
        prepared = await _all(
            self._prepare(source, tenant, token_ids[source.kind]) for source in sources
        )
        places, order = _placeholders(ids, sources, prepared)
        sources, prepared = [sources[i] for i in order], [prepared[i] for i in order]
        parts: list[IntArray] = []
        items: list[MediaItem] = []
        done = start = 0
        for source, (place, end), found in zip(sources, places, prepared, strict=True):
            parts += [ids[done:place], np.array(found.tokens, np.int32)]
            start += place - done
            stop = start + len(found.tokens)
            items.append(
                MediaItem(
                    kind=source.kind,
                    start=start,
                    stop=stop,
                    token_id=token_ids[source.kind],
                    digest=found.digest,
                    features=found.features,
                    grid=found.grid,
                    time_step=found.time_step,
                )
            )
            start, done = stop, end
        return np.concatenate([*parts, ids[done:]]), tuple(items)

    async def samples(self, source: MediaSource) -> tuple[np.ndarray, int]:
        """Return audio as float32 (N,), and its sampling rate for the model.

        Raises:
            RequestError: It cannot be decoded.
        """
        data = await self._fetcher.read(source)
        order = self._prepare_item(source, data, {SAMPLES: True})
        found = await self._workers.prepare(order, source.path)
        return found.features["samples"], int(found.features["rate"])

    async def pages(self, source: MediaSource) -> list[bytes]:
        """Return the pages of a PDF document as PNG files.

        Raises:
            RequestError: It cannot be read, or has more than `media.items` pages.
        """
        data = await self._fetcher.read(source)
        order = self._prepare_item(source, data, {PAGES: self._settings.items})
        found = (await self._workers.prepare(order, source.path)).features
        return [found[str(number)].tobytes() for number in range(len(found))]

    async def close(self) -> None:
        """Stop processes and connections."""
        await self._fetcher.close()
        if self._remote is not None:
            await self._remote.close()
        await self._workers.close()

    async def _prepare(self, source: MediaSource, tenant: str, token: int) -> PreparedItem:
        if VECTORS in source.options:
            return given_vectors(source, token)
        data = await self._fetcher.read(source)
        key = _key(source, data, tenant)
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        order = self._prepare_item(source, data, source.options)
        if self._remote is not None:
            found = await self._remote.encode(order, tenant, source.path)
        else:
            found = await self._workers.prepare(order, source.path)
        if key not in self._kept:
            self._kept[key] = found
            self._kept_bytes += _size(found)
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= _size(self._kept.popitem(last=False)[1])
        return found

    def _numbered(self, sources: Sequence[MediaSource]) -> Sequence[MediaSource]:
        """Add each item's number, and their count, for processors that need them."""
        if not self._counts:
            return sources
        count = min(len(sources), MANY)
        return [
            replace(source, options=source.options | {NUMBER: number, COUNT: count})
            for number, source in enumerate(sources)
        ]

    def _prepare_item(
        self, source: MediaSource, data: bytes, options: dict[str, Any]
    ) -> PrepareItem:
        return PrepareItem(
            id=0,
            kind=source.kind,
            data=data,
            max_pixels=self._settings.pixels,
            max_frames=self._settings.frames,
            max_seconds=self._settings.seconds,
            options=options,
        )


async def _all(works: Iterable[Coroutine[None, None, PreparedItem]]) -> list[PreparedItem]:
    """Return all results in order; one failure cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _check_kinds(sources: Sequence[MediaSource], token_ids: Mapping[MediaKind, int]) -> None:
    for source in sources:
        if source.kind not in token_ids:
            takes = listed(("text", *(kind for kind in MEDIA_KINDS if kind in token_ids)))
            message = f"{source.path}: this model takes {takes}, no {source.kind}."
            raise RequestError(message, param=source.path)


def _placeholders(
    ids: IntArray, sources: Sequence[MediaSource], prepared: Sequence[PreparedItem]
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the ranges of the prompt to replace, with the item of each.

    Items of one kind keep their order; the prompt decides the order between kinds.
    """
    left: dict[int, list[int]] = {}
    for index, item in enumerate(prepared):
        left.setdefault(item.placeholder, []).append(index)
    places: list[int] = np.flatnonzero(np.isin(ids, list(left))).tolist()
    tokens: list[int] = ids[places].tolist()
    for token, indices in left.items():
        if (count := tokens.count(token)) != len(indices):
            source = sources[indices[0]]
            raise RequestError(
                f"{source.path}: the prompt has {count} placeholders for {len(indices)} "
                f"{source.kind}s; each needs one.",
                param=source.path,
            )
    order = [left[token].pop(0) for token in tokens]
    found = [_replaced(ids, place, prepared[i]) for place, i in zip(places, order, strict=True)]
    return found, order


def _replaced(ids: IntArray, place: int, item: PreparedItem) -> tuple[int, int]:
    if item.around and 0 < place < len(ids) - 1:
        before, after = item.around
        if (ids[place - 1], ids[place + 1]) == (before, after):
            return place - 1, place + 2
    return place, place + 1


def _key(source: MediaSource, data: bytes, tenant: str) -> bytes:
    found = hashlib.sha256(f"{source.kind}|{tenant}|".encode())
    found.update(msgspec.json.encode(source.options, order="sorted"))
    found.update(data)
    return found.digest()


def _size(found: PreparedItem) -> int:
    return sum(array.nbytes for array in found.features.values()) + 4 * len(found.tokens)
