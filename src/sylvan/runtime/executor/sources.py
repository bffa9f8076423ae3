"""Opens the tensors of weight updates: files, memory, process groups; never reads a pickle."""

from __future__ import annotations

import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import zmq
from safetensors.torch import save_file

from sylvan.protocol.commands import (
    BytesTensors,
    DiskTensors,
    GroupTensors,
    NamedTensors,
    SharedTensors,
    SocketTensors,
    TensorSource,
)
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.update_groups import UpdateGroups
from sylvan.runtime.models.files import LoadFormat, open_weights
from sylvan.runtime.models.in_memory import Merged, read_safetensors
from sylvan.runtime.models.stored import WeightFiles

SHARED = Path("/dev/shm")
_NAME = re.compile(r"/?([A-Za-z0-9][A-Za-z0-9_.\-]{0,200})")
_SOCKET = re.compile(r"ipc://[^\x00]{1,100}|tcp://(127\.0\.0\.1|localhost):\d{1,5}")
_SOCKET_TIMEOUT_S = 60
_READ = (".json", ".safetensors", ".bin", ".pt", ".gguf")


class WeightSources:
    """Opens the sources of updates, and stores tensors that were loaded under a name.

    Args:
        groups: Groups that broadcast tensors.
        max_bytes: Limit for stored tensors and for received ones.
    """

    def __init__(self, groups: UpdateGroups, max_bytes: int) -> None:
        self._groups, self._most = groups, max_bytes
        self._named: dict[str, list[WeightFiles]] = {}

    def open(self, source: TensorSource) -> WeightFiles:
        """Open a source's tensors.

        Raises:
            ConfigError: the source is missing, broken, or larger than any weights of this model.
        """
        match source:
            case DiskTensors(path=path, load_format=kind):
                files = open_weights(_directory(path), _load_format(kind))
            case BytesTensors(data=data):
                files = read_safetensors(data, "the tensors sent")
            case SharedTensors(name=name, num_bytes=size):
                files = _shared(name, size)
            case GroupTensors():
                files = self._groups.receive(source, self._most)
            case SocketTensors(address=address):
                files = Merged(list(_asked_for(address, self._most)))
            case NamedTensors(name=name):
                files = Merged(self._kept(name))
        return files

    def keep(self, name: str, source: TensorSource) -> WeightFiles:
        """Store the tensors of a source under a name, in addition to those already there.

        Raises:
            ConfigError: see `open`; or the stored tensors would exceed the limit.
        """
        opened = self.open(source)
        kept = self._named.get(name, [])
        total = opened.num_bytes + sum(
            files.num_bytes for parts in self._named.values() for files in parts
        )
        if total > self._most:
            raise ConfigError(
                f"stored tensors would take {total:,} bytes; at most {self._most:,} are allowed, "
                "twice the size of the model in float32"
            )
        self._named[name] = [*kept, opened]
        return opened

    def share(self, source: TensorSource) -> tuple[str, int]:
        """Copy the tensors of a source into shared memory; return its name and size in bytes.

        Raises:
            ConfigError: see `open`.
        """
        files = self.open(source)
        path = SHARED / f"sylvan-weights-{secrets.token_hex(8)}"
        path.touch(mode=0o600, exist_ok=False)
        try:
            save_file({name: files.tensor(name).contiguous() for name in files.tensors}, path)
        except BaseException:
            path.unlink()
            raise
        return path.name, path.stat().st_size

    def drop(self, name: str) -> int:
        """Free the tensors stored under a name; return their number.

        Raises:
            ConfigError: nothing is stored under it.
        """
        found = self._kept(name)
        del self._named[name]
        return sum(len(files.tensors) for files in found)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of stored tensors."""
        return tuple(self._named)

    def _kept(self, name: str) -> list[WeightFiles]:
        if name not in self._named:
            raise ConfigError(f"no weights are loaded under the name {name!r}")
        return self._named[name]


def _directory(path: str) -> Path:
    found = Path(path)
    if not found.is_dir():
        raise ConfigError(f"model_path {path!r} is not a directory of this machine")
    for file in found.iterdir():
        if file.suffix in _READ and file.exists() and not file.is_file():
            raise ConfigError(f"{str(file)!r} is not a regular file")  # opening a pipe would block
    return found


def _load_format(kind: str) -> LoadFormat:
    for known in get_args(LoadFormat):
        if kind == known:
            return known
    raise ConfigError(f"load_format must be one of {', '.join(get_args(LoadFormat))}, not {kind!r}")


def _shared(name: str, num_bytes: int) -> WeightFiles:
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(f"{name!r} is not the name of shared memory")
    where = f"shared memory {name}"
    try:
        # opening a pipe would block
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(SHARED / found[1], flags)
    except OSError as error:
        raise ConfigError(f"{where} cannot be opened: {error.strerror}") from None
    try:
        kind, size = os.fstat(fd).st_mode, os.fstat(fd).st_size
        if not stat.S_ISREG(kind):
            raise ConfigError(f"{where} is not a regular file")
        if not 8 <= num_bytes <= size:
            raise ConfigError(f"{where} has {size:,} bytes, not {num_bytes:,}")
        # private mapping: writable tensors over it change no file
        region = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    return read_safetensors(np.frombuffer(region, np.uint8), where, region)


def _asked_for(address: str, max_bytes: int) -> Iterator[WeightFiles]:
    if not _SOCKET.fullmatch(address):
        raise ConfigError(f"{address!r} is not a ZeroMQ socket of this machine (ipc:// or tcp://)")
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, _SOCKET_TIMEOUT_S * 1000)
    total = 0
    try:
        socket.connect(address)
        while True:
            socket.send(b"next")
            data = socket.recv()
            if not data:
                return
            total += len(data)
            if total > max_bytes:
                raise ConfigError(f"{address} sent more than {max_bytes:,} bytes")
            yield read_safetensors(np.frombuffer(data, np.uint8), address, data)
    except zmq.ZMQError as error:
        raise ConfigError(f"{address} did not answer: {error.strerror}") from None
    finally:
        socket.close()
