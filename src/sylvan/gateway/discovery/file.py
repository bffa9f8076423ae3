"""Discovers workers from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import yaml

from sylvan.gateway.discovery.api import DiscoveryError
from sylvan.gateway.workers.spec import WorkerSpec, checked
from sylvan.protocol.errors import RequestError
from sylvan.utils.threads import call_in_thread

MAX_BYTES = 16 << 20

_Row = str | dict[str, object]


class _Rows(msgspec.Struct):
    workers: list[_Row]


class FileSource:
    """A YAML or JSON file with a list of workers, or an object whose `workers` is such a list.

    A worker is an address or an object as in `POST /workers`. The file is read again when its
    mtime, size or inode changes, so editing in place and replacing the file both work.

    Args:
        path: Path of the file; it may be missing for a while.
        template: Defaults for what the file leaves out.
    """

    name: ClassVar[str] = "file"

    def __init__(self, path: Path, template: WorkerSpec) -> None:
        self._path = path
        self._template = template
        self._seen: tuple[int, int, int] | None = None

    async def list_workers(self) -> Sequence[WorkerSpec] | None:
        return await call_in_thread(self._read_if_changed)

    def _read_if_changed(self) -> Sequence[WorkerSpec] | None:
        try:
            facts = self._path.stat()
            seen = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
            if seen == self._seen:
                return None
            if facts.st_size > MAX_BYTES:
                raise DiscoveryError(f"{self._path} has more than {MAX_BYTES >> 20} MiB")
            specs = self._read(self._path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DiscoveryError(f"{self._path} cannot be read: {error}") from error
        self._seen = seen
        return specs

    def _read(self, text: str) -> Sequence[WorkerSpec]:
        try:
            content = json.loads(text) if self._path.suffix == ".json" else yaml.safe_load(text)
            rows = msgspec.convert(content, _Rows | list[_Row])
        except (ValueError, yaml.YAMLError) as error:
            raise DiscoveryError(f"{self._path}: expected a list of workers: {error}") from error
        if isinstance(rows, _Rows):
            rows = rows.workers
        specs = [self._spec(number, row) for number, row in enumerate(rows)]
        if len({spec.url for spec in specs}) < len(specs):
            raise DiscoveryError(f"{self._path}: an address is given twice")
        return specs

    def _spec(self, number: int, row: _Row) -> WorkerSpec:
        fields = {"url": row} if isinstance(row, str) else row
        known = msgspec.structs.asdict(self._template)
        try:
            return checked(msgspec.convert({**known, **fields}, WorkerSpec))
        except (msgspec.ValidationError, RequestError) as error:
            raise DiscoveryError(f"{self._path}: workers[{number}]: {error}") from error
