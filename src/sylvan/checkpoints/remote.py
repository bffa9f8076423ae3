"""Downloads a checkpoint with fsspec (s3, gs, https, memory, ...) into the cache, once.

A file is downloaded under a temporary name and renamed when complete; interrupted downloads resume.
After all files a list of them is written, and the network is not used again. Delete the directory
to download again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sylvan.checkpoints.formats import PT_INDEX, SAFETENSORS_INDEX
from sylvan.protocol.errors import ConfigError
from sylvan.utils.lock import locked

Progress = Callable[[int, int], None]
"""Called with (downloaded bytes, total bytes)."""

_URL = re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)
_DONE = "sylvan-fetched.json"
_CHUNK = 16 << 20
_TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_WEIGHTS = (".safetensors", ".gguf", ".bin")
_INSIDE = re.compile(r"additional_chat_templates/|\d+_\w+/")
"""Subdirectories to download; others hold copies in other formats."""
_USUAL = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "tokenizer.model", "tekken.json"),
    *("modules.json", SAFETENSORS_INDEX, "model.safetensors", PT_INDEX, "pytorch_model.bin"),
)
"""Files to try on servers that cannot list directories."""


def is_remote(model: str) -> bool:
    """Whether `model` is a URL."""
    return _URL.match(model) is not None


def fetch(url: str, cache: Path, progress: Progress | None = None) -> Path:
    """Return the local copy of a remote model directory or GGUF file under `cache`.

    Raises:
        ConfigError: It cannot be reached, has no model, or a package is missing; one sentence.
    """
    name = PurePosixPath(url.split("?")[0].rstrip("/")).name or "model"
    key = hashlib.sha256(url.encode()).hexdigest()[:16]
    folder = cache / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{key}"
    wanted = folder / name if name.endswith(".gguf") else folder
    if (folder / _DONE).is_file():
        return wanted
    with _named(url):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            if not (folder / _DONE).is_file():  # no other process has downloaded it
                _fetch_all(_Remote.open(url), folder, progress or _silent)
    return wanted


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Convert driver errors to one sentence that names the URL without its password."""
    shown = re.sub(r"//[^/@]*@", "//", url)
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"model: {shown!r}: {error}") from None
    except ImportError as error:
        raise ConfigError(f"model: {shown!r} needs another package: {error}") from None
    except Exception as error:  # each driver has its own errors
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"model: {shown!r} cannot be fetched: {reason}") from error


@dataclass(frozen=True, slots=True)
class _File:
    """A remote file; `stamp` changes with its content; `size` None: unknown."""

    path: str
    size: int | None
    stamp: str
    resumes: bool


@dataclass(frozen=True, slots=True)
class _Remote:
    """A folder or file of an fsspec file system."""

    system: Any
    root: str

    @classmethod
    def open(cls, url: str) -> _Remote:
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError:
            raise ConfigError("remote paths need fsspec: pip install 'sylvan[remote]'") from None
        system, root = fsspec.core.url_to_fs(url)
        return cls(system, root.rstrip("/"))

    def files(self) -> dict[str, _File]:
        """Files of the model, by their name in the copy."""
        if self.root.endswith(".gguf"):
            return {PurePosixPath(self.root).name: self._file(self.root)}
        names = self._listed() or self._found()
        return {name: self._file(f"{self.root}/{name}") for name in chosen(names)}

    def text(self, name: str) -> str:
        return self.system.cat_file(f"{self.root}/{name}").decode("utf-8")

    def _listed(self) -> list[str]:
        found = self.system.find(self.root, maxdepth=2)
        names = [path[len(self.root) :].lstrip("/") for path in map(str, found)]
        return names if "config.json" in names or _only_gguf(names) else []

    def _found(self) -> list[str]:
        """Find files on servers that cannot list directories."""
        names = [name for name in _USUAL if self.system.exists(f"{self.root}/{name}")]
        for index in {SAFETENSORS_INDEX, PT_INDEX} & set(names):
            names += set(json.loads(self.text(index)).get("weight_map", {}).values())
        return names

    def _file(self, path: str) -> _File:
        info: Mapping[str, Any] = self.system.info(path)
        size = info.get("size")
        stamps = [
            str(info.get(key)) for key in ("ETag", "etag", "LastModified", "mtime", "created")
        ]
        web = {"http", "https"} & set(_protocols(self.system))
        resumes = size is not None and (not web or bool(info.get("partial")))
        stamp = hashlib.sha256("\n".join([str(size), *stamps]).encode()).hexdigest()[:8]
        return _File(path, size, stamp, resumes)


def chosen(names: list[str]) -> list[str]:
    """Select the files to download: text files, and the preferred kind of weights."""
    ours = [name for name in names if "/" not in name or _INSIDE.match(name)]
    for name in ours:
        if ".." in PurePosixPath(name).parts or name.startswith("/") or "\\" in name:
            raise ConfigError(f"the file name {name!r} points outside of the model directory")
    kinds = [end for end in _WEIGHTS if any(n.endswith(end) for n in ours if "/" not in n)]
    ends = (*_TEXTS, *kinds[:1])
    found = [name for name in ours if name.endswith(ends)]
    if "config.json" not in found and not _only_gguf(found):
        raise ConfigError("it has no config.json, so it is not a model directory")
    return found


def _only_gguf(names: list[str]) -> bool:
    return any(name.endswith(".gguf") for name in names)


def _protocols(system: Any) -> tuple[str, ...]:
    found = system.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def _fetch_all(remote: _Remote, folder: Path, progress: Progress) -> None:
    files = remote.files()
    total = sum(file.size or 0 for file in files.values())
    done = 0
    for name, file in files.items():
        here = done
        size = _fetch_one(
            remote.system,
            file,
            folder / name,
            lambda bytes_of_it, here=here: progress(here + bytes_of_it, total),
        )
        done += size
        progress(done, max(total, done))
    for name, file in files.items():
        _beside(folder / name, file, "whole").replace(folder / name)
    table = {name: (folder / name).stat().st_size for name in files}
    part = folder / (_DONE + ".partial")
    part.write_text(json.dumps(table, indent=1), "utf-8")
    part.replace(folder / _DONE)


def _fetch_one(system: Any, file: _File, target: Path, progress: Callable[[int], None]) -> int:
    """Download a file; return its size."""
    whole, part = _beside(target, file, "whole"), _beside(target, file, "partial")
    if whole.is_file():  # left by an interrupted download
        return whole.stat().st_size
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.resumes and file.size is not None:
        _append_rest(system, file.path, file.size, part, progress)
    else:
        system.get_file(file.path, str(part))
    size = part.stat().st_size
    if file.size is not None and size != file.size:
        part.unlink()
        raise ConfigError(f"{target.name} came with {size} bytes instead of {file.size}")
    part.replace(whole)
    return size


def _beside(target: Path, file: _File, state: str) -> Path:
    """Path of an incomplete file; it depends on the remote content."""
    return target.with_name(f".{target.name}.{file.stamp}.{state}")


def _append_rest(
    system: Any, path: str, size: int, part: Path, progress: Callable[[int], None]
) -> None:
    with part.open("ab") as stream:
        at = stream.tell()
        while at < size:
            data: bytes = system.cat_file(path, start=at, end=min(size, at + _CHUNK))
            if not data:
                break
            stream.write(data)
            at += len(data)
            progress(at)
        stream.flush()
        os.fsync(stream.fileno())


def _silent(done: int, total: int) -> None:
    """Progress callback that does nothing."""
