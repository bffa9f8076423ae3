"""Text processing of each model, loaded from a directory or from a worker."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tempfile
import zipfile
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

import msgspec

from sylvan.config.route import TokensConfig
from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.text.model import ModelText
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.utils.threads import call_in_thread

MAX_ARCHIVE_BYTES = 512 << 20
MAX_FILES = 64
MAX_TOKENIZERS = 256
MAX_SOURCES = 3

Fetch = Callable[[Worker], Awaitable[tuple[bytes, str]]]
"""A worker's tokenizer as a ZIP archive, and its SHA-256."""


@dataclass(frozen=True, slots=True)
class PendingTokenizer:
    """A tokenizer that is loaded or loading.

    Attributes:
        id: Its ID in URLs.
        name: Name of the model.
        source: Directory or worker from which it is loaded.
        task: The loading task.
        requested: An operator asked for it, so failures are reported.
    """

    id: str
    name: str
    source: str
    task: asyncio.Task[ModelText]
    requested: bool = False

    @property
    def failure(self) -> str | None:
        """Why loading failed."""
        task = self.task
        failed = task.done() and not task.cancelled() and task.exception() is not None
        return str(task.exception()) if failed else None

    @property
    def text(self) -> ModelText | None:
        """The result; None: not loaded yet, or failed."""
        task = self.task
        done = task.done() and not task.cancelled() and task.exception() is None
        return task.result() if done else None


class TextLibrary:
    """Loads the text processing of models on first use; belongs to one event loop.

    Args:
        config: Tokenizer directories, and output formats.
        fetch: Downloads the tokenizer of a gRPC worker; None: there are no such workers.
    """

    def __init__(self, config: TokensConfig, fetch: Fetch | None = None) -> None:
        self._config = config
        self._fetch = fetch
        self._loading: dict[str, PendingTokenizer] = {}

    @property
    def all(self) -> Sequence[PendingTokenizer]:
        """All tokenizers."""
        return tuple(self._loading.values())

    def get(self, name_or_id: str) -> PendingTokenizer | None:
        """One tokenizer."""
        known = self._loading.get(name_or_id)
        return known or next((one for one in self.all if one.id == name_or_id), None)

    async def of(self, worker: Worker) -> ModelText:
        """Return the text processing of a worker's model, loading it if needed.

        Raises:
            UpstreamError: The worker does not provide it, or it is unusable; the next call
                retries.
        """
        return await asyncio.shield(self._of(worker).task)

    async def of_any(self, workers: Sequence[Worker]) -> ModelText:
        """Return the text processing of a model that some workers serve.

        If it is not loaded yet, up to `MAX_SOURCES` workers are asked in turn: one may be gone
        without being known to be.

        Raises:
            UpstreamError: None of them provides it; see `of`.
        """
        *others, last = workers[:MAX_SOURCES]
        for worker in others:
            try:
                return await self.of(worker)
            except UpstreamError:
                continue
        return await self.of(last)

    def get_loaded(self, worker: Worker) -> ModelText | None:
        """Return the text processing of a worker's model if it is loaded; else start loading it."""
        return self._of(worker).text

    def add(self, name: str, folder: str, template: str | None = None) -> PendingTokenizer:
        """Start loading the tokenizer of a model from a directory.

        Raises:
            RequestError: It exists already (409), or there are too many.
        """
        if name in self._loading:
            message = f"There is a tokenizer of {name[:200]!r}."
            raise RequestError(message, param="name", status=409)
        if len(self._loading) >= MAX_TOKENIZERS:
            message = f"There are {MAX_TOKENIZERS} tokenizers; no more can be added."
            raise RequestError(message, param="name", status=429)
        config = self._config
        if template is not None:
            config = msgspec.structs.replace(config, chat_template=template)
        loading = self._from_folder(folder, config)
        return self._begin(name, folder, loading, requested=True)

    def remove(self, found: PendingTokenizer) -> None:
        """Unload a tokenizer; it is loaded again when needed."""
        found.task.cancel()
        if self._loading.get(found.name) is found:
            del self._loading[found.name]

    def _of(self, worker: Worker) -> PendingTokenizer:
        name = worker.models[0] if worker.models else worker.url
        known = self._loading.get(name)
        if known is not None:
            return known
        folder = worker.spec.tokenizer_path or self._config.tokenizer
        loading = self._load(worker, folder)
        return self._begin(name, folder or worker.url, loading)

    def _begin(
        self,
        name: str,
        source: str,
        loading: Coroutine[Any, Any, ModelText],
        *,
        requested: bool = False,
    ) -> PendingTokenizer:
        task = asyncio.get_running_loop().create_task(loading)
        made = PendingTokenizer(uuid4().hex, name, source, task, requested)
        self._loading[name] = made
        task.add_done_callback(lambda done: self._loaded(made, done))
        return made

    def _loaded(self, made: PendingTokenizer, task: asyncio.Task[ModelText]) -> None:
        if task.cancelled():
            return
        failed = task.exception() is not None
        if failed and not made.requested and self._loading.get(made.name) is made:
            del self._loading[made.name]  # the next attempt may succeed

    async def _load(self, worker: Worker, folder: str | None) -> ModelText:
        if folder is not None:
            return await self._from_folder(folder, self._config)
        if self._fetch is None or worker.connection != "grpc":
            message = f"The tokenizer of {worker.url} is not known: set tokens.tokenizer."
            raise UpstreamError(message, kind="protocol")
        data, digest = await self._fetch(worker)
        try:
            return await call_in_thread(self._unpacked, data, digest)
        except (ConfigError, OSError, zipfile.BadZipFile, ValueError) as error:
            message = f"The tokenizer of {worker.url} cannot be used: {error}"
            raise UpstreamError(message, kind="protocol") from error

    async def _from_folder(self, folder: str, config: TokensConfig) -> ModelText:
        try:
            return await call_in_thread(ModelText.load, Path(folder), config)
        except (ConfigError, OSError, ValueError) as error:
            message = f"The tokenizer in {folder} cannot be used: {error}"
            raise UpstreamError(message, kind="protocol") from error

    def _unpacked(self, data: bytes, digest: str) -> ModelText:
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError("its checksum is wrong")
        with tempfile.TemporaryDirectory(prefix="sylvan-") as made:
            folder = Path(made)
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                entries = archive.infolist()
                size = sum(entry.file_size for entry in entries)
                if len(entries) > MAX_FILES or size > MAX_ARCHIVE_BYTES:
                    raise ValueError("its archive is too large")
                for entry in entries:
                    name = PurePosixPath(entry.filename).name  # no directories, no paths outside
                    if name:
                        (folder / name).write_bytes(archive.read(entry))
            return ModelText.load(folder, self._config)
