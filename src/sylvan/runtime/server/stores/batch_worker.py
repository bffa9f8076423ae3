"""Runs batches, a few requests at a time, at the lowest priority."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from sylvan.api.strict_json import decode_json
from sylvan.protocol.errors import CapacityError
from sylvan.runtime.server.stores.batches import BatchStore, Item, ItemAnswer, StoredFile
from sylvan.utils.tasks import settled
from sylvan.utils.threads import call_in_thread

log = logging.getLogger(__name__)

CONCURRENCY = 8
PAGE = 64
RETRY_STATUSES = (429, 503)
RETRY_S = 1.0

# The code and message of "batch_expired" are those of OpenAI's guide to the Batch API.
_UNANSWERED = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was answered."),
    "failed": ("internal_error", "This request could not be executed; see the server's log."),
}

P = ParamSpec("P")
T = TypeVar("T")

Execute = Callable[[str, str, Any], Awaitable[tuple[int, Any]]]
"""Maps tenant, endpoint and body to the status and body of the answer; does not raise."""


class _Waiting:
    """The unanswered requests of a batch, a few in memory at a time."""

    def __init__(self, fetch: Callable[[int], Awaitable[list[Item]]]) -> None:
        self._fetch = fetch
        self._lock = asyncio.Lock()
        self._items: deque[Item] = deque()
        self._last = -1

    async def take(self) -> Item | None:
        """Return the next request; None if there is none."""
        async with self._lock:
            if not self._items:
                self._items.extend(await self._fetch(self._last))
            if not self._items:
                return None
            item = self._items.popleft()
            self._last = item.line
            return item


class _Answers:
    """Saves concurrent answers in one transaction, because each transaction costs an fsync."""

    def __init__(self, store: Callable[[list[ItemAnswer]], Awaitable[None]]) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._waiting: list[ItemAnswer] = []

    async def add(self, answer: ItemAnswer) -> None:
        """Return once the answer is saved."""
        self._waiting.append(answer)
        async with self._lock:
            if answer not in self._waiting:  # saved together with another
                return
            answers, self._waiting = self._waiting, []
            try:
                await self._store(answers)
            except BaseException:
                self._waiting = answers + self._waiting  # this task saves the answers of others too
                raise


class BatchWorker:
    """Answers the requests of batches in at most one task, which ends when there is no work.

    Each tenant's oldest batch is processed, and all tenants get equal shares of the concurrent
    requests.

    Args:
        store: The store of batches.
        wall: Wall clock, in seconds since the Unix epoch.
        retry_s: Seconds between retries of a request or of an unavailable store.
    """

    def __init__(
        self, store: BatchStore, wall: Callable[[], float], retry_s: float = RETRY_S
    ) -> None:
        self._store = store
        self._retry_s = retry_s
        self._execute: Execute | None = None
        self._wall = wall
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._answers = _Answers(lambda answers: self._stored(self._store.answer, answers))
        self._cancelled: dict[str, asyncio.Event] = {}

    def begin(self, execute: Execute) -> None:
        """Resume the batches of an earlier run; `execute` answers one request."""
        self._execute = execute
        if self._store.unfinished():
            self.wake()

    def wake(self) -> None:
        """Resume if there is work; needs a running event loop."""
        self._news.set()
        if self._execute is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    def cancel(self, batch: str) -> None:
        """Cancel a batch."""
        self._cancelled.setdefault(batch, asyncio.Event()).set()

    async def stop(self) -> None:
        """Stop; unfinished batches resume at the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        working: dict[str, asyncio.Task[None]] = {}
        news = asyncio.create_task(self._news.wait())
        try:
            while True:
                self._news.clear()
                waiting = await self._stored(self._store.unfinished)
                if not waiting and not working:
                    return
                for tenant, state in waiting:
                    if tenant not in working:
                        working[tenant] = asyncio.create_task(self._work(tenant, state))
                if news.done():
                    news = asyncio.create_task(self._news.wait())
                await asyncio.wait({*working.values(), news}, return_when=asyncio.FIRST_COMPLETED)
                for tenant in [name for name, task in working.items() if task.done()]:
                    await self._left(working.pop(tenant))
        finally:
            for task in (news, *working.values()):
                task.cancel()
            await asyncio.gather(news, *working.values(), return_exceptions=True)

    async def _left(self, work: asyncio.Task[None]) -> None:
        """Retry a batch later that an internal error interrupted."""
        error = work.exception()
        if error is not None:
            log.error("a batch could not be ended; it is tried again", exc_info=error)
            await asyncio.sleep(self._retry_s)

    async def _stored(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the store, retrying until it is available."""
        lost = False
        while True:
            try:
                found = await call_in_thread(call, *args, **kwargs)
            except CapacityError as error:
                if not lost:
                    log.warning("batches wait: %s", error)
                lost = True
                await asyncio.sleep(self._retry_s)
            else:
                if lost:
                    log.warning("batches continue")
                return found

    async def _work(self, tenant: str, state: dict[str, Any]) -> None:
        name = state["id"]
        cancelled = self._cancelled.setdefault(name, asyncio.Event())
        if state["status"] == "cancelling":
            cancelled.set()
        waiting = _Waiting(lambda last: self._stored(self._store.waiting, name, last, PAGE))
        work = asyncio.create_task(self._workers(tenant, state, waiting))
        end = await self._outcome(work, cancelled, state["expires_at"] - self._wall())
        await self._stored(self._finish, tenant, state, end)
        self._cancelled.pop(name, None)

    async def _outcome(
        self, work: asyncio.Task[None], cancelled: asyncio.Event, left_s: float
    ) -> str:
        """Return the final status of a batch: completed, cancelled, or expired."""
        stop = asyncio.create_task(cancelled.wait())
        try:
            await asyncio.wait(
                {work, stop}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            work.cancel()
            stop.cancel()
            outcome = await settled(work)
        if cancelled.is_set():
            return "cancelled"
        if outcome is None:
            return "completed"
        if isinstance(outcome, asyncio.CancelledError):
            return "expired"
        log.error("batch failed", exc_info=outcome)
        return "failed"

    async def _workers(self, tenant: str, state: dict[str, Any], waiting: _Waiting) -> None:
        async with asyncio.TaskGroup() as workers:  # one failure cancels the others
            for _ in range(CONCURRENCY):
                workers.create_task(self._worker(tenant, state, waiting))

    async def _worker(self, tenant: str, state: dict[str, Any], waiting: _Waiting) -> None:
        while (item := await waiting.take()) is not None:
            status, answer = await self._answer(tenant, state["endpoint"], item)
            text = json.dumps(answer)
            await self._answers.add(ItemAnswer(state["id"], item.line, status, text))

    async def _answer(self, tenant: str, endpoint: str, item: Item) -> tuple[int, Any]:
        assert self._execute is not None, "begun before it runs"
        body = await call_in_thread(decode_json, item.body.encode())  # may be large
        while True:
            async with self._slots:  # first come, first served: tenants' queues take turns
                status, answer = await self._execute(tenant, endpoint, body)
            if status not in RETRY_STATUSES:
                return status, answer
            await asyncio.sleep(self._retry_s)

    def _finish(self, tenant: str, state: dict[str, Any], end: str) -> None:
        """Write the output and error files, and the final state."""
        state = self._store.batch(state["id"], tenant) or state
        counts = request_counts(*self._store.counts(state["id"]))
        good: list[bytes] = []
        bad: list[bytes] = []
        for item in self._store.items(state["id"]):
            if item.status is not None:
                (bad if item.status >= 400 else good).append(_answered(item))
            elif end in _UNANSWERED and (end != "cancelled" or state.get("lists_cancelled")):
                bad.append(_failed_line(item, *_UNANSWERED[end]))
        files: list[tuple[StoredFile, bytes]] = []
        for kind, lines in (("output_file_id", good), ("error_file_id", bad)):
            if lines:
                files.append(self._file(tenant, state["id"], kind, b"".join(lines)))
                state[kind] = files[-1][0].id
        now = int(self._wall())
        state.update({"status": end, "finalizing_at": now, f"{end}_at": now})
        state["request_counts"] = counts
        if end == "failed":
            fault = {"code": "internal_error", "message": "Internal error; see the server's log."}
            state["errors"] = {"object": "list", "data": [{**fault, "line": None, "param": None}]}
        self._store.end_batch(tenant, state, files)
        log.info("batch ended batch=%s status=%s", state["id"], end)

    def _file(self, tenant: str, batch: str, kind: str, content: bytes) -> tuple[StoredFile, bytes]:
        name = f"file-{secrets.token_hex(12)}"
        filename = f"{batch}_{kind.removesuffix('_file_id')}.jsonl"
        now = int(self._wall())
        file = StoredFile(name, tenant, filename, "batch_output", now, len(content))
        return file, content


def request_counts(total: int, answered: int, failed: int) -> dict[str, int]:
    """Return the progress of a batch in the API's format."""
    return {"total": total, "completed": answered - failed, "failed": failed}


def _answered(item: Item) -> bytes:
    response = {
        "status_code": item.status,
        "request_id": f"req_{item.line}",
        "body": json.loads(item.response or "null"),
    }
    return _line(item, response, None)


def _failed_line(item: Item, code: str, message: str) -> bytes:
    return _line(item, None, {"code": code, "message": message})


def _line(item: Item, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    line = {
        "id": f"batch_req_{item.line}",
        "custom_id": item.custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(line).encode() + b"\n"
