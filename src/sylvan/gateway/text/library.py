"""The text side of each model, from a directory or from a worker of the model."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tempfile
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath

from sylvan.config.route import TokensConfig
from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.text.model import ModelText
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.errors import ConfigError
from sylvan.utils.threads import call_in_thread

MAX_ARCHIVE_BYTES = 512 << 20
MAX_FILES = 64

Fetch = Callable[[Worker], Awaitable[tuple[bytes, str]]]
"""The tokenizer of a worker as a ZIP archive, and its SHA-256."""


class TextLibrary:
    """Loads the text of models when it is first needed; belongs to one event loop.

    Args:
        config: Where tokenizers are, and formats of outputs.
        fetch: Asks a worker for its tokenizer.
    """

    def __init__(self, config: TokensConfig, fetch: Fetch) -> None:
        self._config = config
        self._fetch = fetch
        self._loading: dict[str, asyncio.Task[ModelText]] = {}

    async def of(self, worker: Worker) -> ModelText:
        """The text of the model that a worker serves.

        Raises:
            UpstreamError: The worker does not give it, or it cannot be used; asked for again, it
                is tried again.
        """
        name = worker.models[0] if worker.models else worker.url
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.create_task(self._load(worker))
            task.add_done_callback(lambda done: self._settle(name, done))
        return await asyncio.shield(task)

    def _settle(self, name: str, task: asyncio.Task[ModelText]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._loading.pop(name, None)

    async def _load(self, worker: Worker) -> ModelText:
        folder = worker.spec.tokenizer_path or self._config.tokenizer
        try:
            if folder is not None:
                return await call_in_thread(ModelText.load, Path(folder), self._config)
            data, digest = await self._fetch(worker)
            return await call_in_thread(self._unpacked, data, digest)
        except (ConfigError, OSError, zipfile.BadZipFile, ValueError) as error:
            message = f"The tokenizer of {worker.url} cannot be used: {error}"
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
                    name = PurePosixPath(entry.filename).name  # no folders, wherever they lead
                    if name:
                        (folder / name).write_bytes(archive.read(entry))
            return ModelText.load(folder, self._config)
