"""Processes that prepare items, one at a time each; a process that is too slow is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import msgspec

from sylvan.config.env import without_settings
from sylvan.media.frames import HEADER_BYTES, header, length
from sylvan.media.messages import MAX_FRAME_BYTES, PreparedItem, PrepareItem
from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.transport.codec import MessageDecoder, MessageEncoder

_PROGRAM = "sylvan.media.worker"
_START_S = 120.0  # importing transformers on a busy machine


class MediaWorkers:
    """Prepares items in processes, so that no file can block or crash the server.

    Args:
        model_dir: Checkpoint whose processor is used.
        count: Number of processes; started on demand.
        process_s: Time limit of one item.
    """

    def __init__(self, model_dir: Path, count: int, process_s: float) -> None:
        self._model_dir, self._process_s = model_dir, process_s
        self._idle: list[_Worker] = []
        self._free = asyncio.Semaphore(count)
        self._ids = itertools.count()
        self._closed = False

    async def prepare(self, item: PrepareItem, path: str) -> PreparedItem:
        """Prepare one item; `path` is its path in the body.

        Raises:
            RequestError: The item is invalid; the message names the path.
            CapacityError: No process could be started.
        """
        async with self._free:
            worker = self._idle.pop() if self._idle else await _Worker.start(self._model_dir)
            try:
                async with asyncio.timeout(self._process_s):
                    answer = await worker.ask(item, next(self._ids))
            except TimeoutError as error:
                await worker.end()
                raise RequestError(
                    f"{path}: preparing the {item.kind} took more than {self._process_s:g} s "
                    "(media.process_s).",
                    param=path,
                ) from error
            except (OSError, EOFError, asyncio.IncompleteReadError) as error:
                await worker.end()
                message = (
                    f"{path}: the process that prepared this {item.kind} died; it may be damaged."
                )
                raise RequestError(message, param=path) from error
            except BaseException:
                await worker.end()  # otherwise a stale answer could be taken for the next item's
                raise
            if self._closed:
                await worker.end()
            else:
                self._idle.append(worker)
        if answer.error:
            raise RequestError(f"{path}: {answer.error}.", param=path)
        return answer

    async def close(self) -> None:
        """Stop all processes."""
        self._closed = True
        while self._idle:
            await self._idle.pop().end()


class _Worker:
    """One process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._encoder = MessageEncoder(limit=None)
        self._decoder = MessageDecoder[PreparedItem](PreparedItem)

    @classmethod
    async def start(cls, model_dir: Path) -> _Worker:
        """Start the process, and wait until it is ready.

        Raises:
            CapacityError: It did not start.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", _PROGRAM, str(model_dir)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=without_settings(),
            start_new_session=True,
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(_START_S):
                hello = await worker._read()
        except (TimeoutError, EOFError, asyncio.IncompleteReadError) as error:
            await worker.end()
            raise CapacityError("the process that prepares images does not start") from error
        if hello.error:
            await worker.end()
            raise CapacityError(f"images cannot be prepared: {hello.error}")
        return worker

    async def ask(self, item: PrepareItem, number: int) -> PreparedItem:
        """Send it an item, and return its answer."""
        stdin = self._process.stdin
        assert stdin is not None
        data = self._encoder.encode(msgspec.structs.replace(item, id=number))
        stdin.write(header(len(data)))
        stdin.write(data)
        await stdin.drain()
        answer = await self._read()
        if answer.id != number:
            raise EOFError
        return answer

    async def end(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _read(self) -> PreparedItem:
        stdout = self._process.stdout
        assert stdout is not None
        size = length(await stdout.readexactly(HEADER_BYTES))
        if size > MAX_FRAME_BYTES:
            raise EOFError
        return self._decoder.decode(await stdout.readexactly(size))
