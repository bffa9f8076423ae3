"""The text side of each model, from a directory or from a worker of the model."""

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

Fetch = Callable[[Worker], Awaitable[tuple[bytes, str]]]
"""The tokenizer of a worker as a ZIP archive, and its SHA-256."""


@dataclass(frozen=True, slots=True)
class PendingTokenizer:
    """A tokenizer, loaded or on its way.

    Attributes:
        id: Its name in addresses.
        name: Name of the model.
        source: Directory or worker that it comes from.
        task: Gives it.
        asked_for: By an operator, who is told when it fails.
    """

    id: str
    name: str
    source: str
    task: asyncio.Task[ModelText]
    asked_for: bool = False

    @property
    def failure(self) -> str | None:
        """Why it could not be loaded."""
        task = self.task
        failed = task.done() and not task.cancelled() and task.exception() is not None
        return str(task.exception()) if failed else None

    @property
    def text(self) -> ModelText | None:
        """What was loaded; None: it is not loaded, or could not be."""
        task = self.task
        done = task.done() and not task.cancelled() and task.exception() is None
        return task.result() if done else None


class TextLibrary:
    """Loads the text of models when it is first needed; belongs to one event loop.

    Args:
        config: Where tokenizers are, and formats of outputs.
        fetch: Asks a worker that speaks gRPC for its tokenizer; None: there are none.
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
        """The text of the model that a worker serves.

        Raises:
            UpstreamError: The worker does not give it, or it cannot be used; asked for again, it
                is tried again.
        """
        return await asyncio.shield(self._of(worker).task)

    def at_hand(self, worker: Worker) -> ModelText | None:
        """The text of the model that a worker serves, if it is loaded; else it is loaded now."""
        return self._of(worker).text

    def add(self, name: str, folder: str, template: str | None = None) -> PendingTokenizer:
        """Load the tokenizer of a model from a directory.

        Raises:
            RequestError: There is one (409), or there are too many.
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
        return self._begin(name, folder, loading, asked_for=True)

    def remove(self, found: PendingTokenizer) -> None:
        """Forget a tokenizer; where it is needed it is loaded anew."""
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
        asked_for: bool = False,
    ) -> PendingTokenizer:
        task = asyncio.get_running_loop().create_task(loading)
        made = PendingTokenizer(uuid4().hex, name, source, task, asked_for)
        self._loading[name] = made
        task.add_done_callback(lambda done: self._settle(made, done))
        return made

    def _settle(self, made: PendingTokenizer, task: asyncio.Task[ModelText]) -> None:
        if task.cancelled():
            return
        failed = task.exception() is not None
        if failed and not made.asked_for and self._loading.get(made.name) is made:
            del self._loading[made.name]  # it may be there the next time

    async def _load(self, worker: Worker, folder: str | None) -> ModelText:
        if folder is not None:
            return await self._from_folder(folder, self._config)
        if self._fetch is None or worker.connection != "grpc":
            message = f"The tokenizer of {worker.url} is not known: give tokens.tokenizer."
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
                    name = PurePosixPath(entry.filename).name  # no folders, wherever they lead
                    if name:
                        (folder / name).write_bytes(archive.read(entry))
            return ModelText.load(folder, self._config)
