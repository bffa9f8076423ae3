"""Manages the child processes of the replicas: starts, monitors, restarts and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sylvan.config import Config
from sylvan.config.chaos import read_faults
from sylvan.config.checkpoint import model_dir
from sylvan.config.tree import ServerConfig
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import Loading, RankRendezvous, ToScheduler
from sylvan.protocol.steps import StepRecord, map_steps, read_steps
from sylvan.runtime.engine.chaos import ProcessFaults
from sylvan.runtime.engine.child_main import ChildConfig
from sylvan.runtime.engine.child_process import ChildProcess, FromChild
from sylvan.runtime.engine.hang_report import REPORTED_STEPS, write_report
from sylvan.runtime.engine.nodes import NodeHub, RemoteNode
from sylvan.runtime.engine.process import SCHEDULER_ARGV, PrewarmedScheduler, start_process
from sylvan.runtime.engine.progress import Progress
from sylvan.runtime.engine.restart import Backoff
from sylvan.runtime.engine.roles import (
    STEPS,
    ProcessObserver,
    ProcessRole,
    Replica,
    Topology,
    roles_of,
)
from sylvan.runtime.engine.watchdog import Watchdog
from sylvan.runtime.executor.early.allowed import may_start_early
from sylvan.runtime.storage.identity import quick_digest
from sylvan.transport.api import AsyncReceiver, MessageSender
from sylvan.transport.arrays import SharedArrays
from sylvan.transport.codec import MessageDecoder, MessageEncoder
from sylvan.transport.delayed import DelayedReceiver, DelayedSender
from sylvan.transport.workspace import Workspace
from sylvan.transport.zmq import AsyncPullReceiver, AsyncPushSender

logger = logging.getLogger(__name__)

DuringStart = Callable[[], Awaitable[object]]
"""Start-up work of the API process, run while its children start."""

STOP_PATIENCE_S = 3.0
_STACKS_S = 1.0  # seconds for a hung process to print its stacks


@dataclass(slots=True)
class _Slot:
    """One role in one replica, and its current process."""

    role: ProcessRole
    replica: int
    name: str
    child: ChildProcess | RemoteNode
    observer: ProcessObserver | None = None


class Supervisor:
    """The child processes of the API process; belongs to its event loop.

    Args:
        topology: The processes.
        parent: Parent directory of the workspace; default: in shared memory.
        progress: Called with the loaded bytes at the first start; None: the children log progress.
        prewarmed: Becomes the first scheduler.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology | None = None,
        *,
        parent: Path | None = None,
        progress: Progress | None = None,
        prewarmed: PrewarmedScheduler | None = None,
    ) -> None:
        # secrets never leave this process
        media = msgspec.structs.replace(config.media, encoder_key=None)
        self._config = msgspec.structs.replace(config, server=ServerConfig(), media=media)
        self._topology = topology or Topology()
        self._roles = self._topology.roles or roles_of(config)
        self._progress = progress
        self._prewarmed = prewarmed
        self._faults = ProcessFaults(read_faults(config.chaos))
        self._workspace = Workspace.create(parent)
        self._arrays = SharedArrays(self._workspace.path)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._runs = itertools.count(1)
        self._group_runs: dict[tuple[int, str], int] = {}  # by replica and group
        self._slots: dict[str, _Slot] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False
        self._hub: NodeHub | None = None
        if config.parallel.nodes > 1:
            try:
                digest = quick_digest(model_dir(config.model))
                self._hub = NodeHub(config, self._context, digest)
            except ConfigError:
                self._release()
                raise

    @property
    def pids(self) -> dict[str, int]:
        """Process IDs of the children by role; with several replicas, by role and replica."""
        children = {name: slot.child for name, slot in self._slots.items()}
        return {n: child.pid for n, child in children.items() if not isinstance(child, RemoteNode)}

    @property
    def workspace(self) -> Path:
        """Directory of sockets and shared arrays."""
        return self._workspace.path

    async def spawn(self, during_start: DuringStart | None = None) -> None:
        """Start all children; `run` waits for them.

        Args:
            during_start: Work of this process. Roles that start first have the other cores to
                themselves until it is done; then the other roles are started. All are started
                at once if none of them has to import PyTorch.
        """
        early = may_start_early(self._config)
        self._spawn_all(first=True)
        if early:
            self._spawn_all(first=False)
        if during_start is not None:
            await during_start()
        if not early:
            self._spawn_all(first=False)

    async def run(self, replicas: Sequence[Replica]) -> None:
        """Wait until all children are ready, notify their observers, and keep them running.

        Raises:
            ConfigError: One cannot start; the message says why.
        """
        slots = tuple(self._slots.values())
        for slot in slots:
            slot.observer = slot.role.observe(replicas[slot.replica])
        for number, replica in enumerate(replicas):
            replica.client.read_steps = partial(self.read_steps, number)
        readies = await asyncio.gather(*(slot.child.ready for slot in slots))
        self._progress = None
        for slot, ready in zip(slots, readies, strict=True):
            _observer(slot).on_ready(ready, slot.child.send)
        groups: dict[tuple[int, str], list[_Slot]] = {}
        for slot in slots:
            groups.setdefault((slot.replica, slot.role.group or slot.role.name), []).append(slot)
            if slot.role.heartbeat_limit_s is not None:
                limit_s = slot.role.heartbeat_limit_s(self._config)
                self._run_task(slot, self._watch(slot, Watchdog(limit_s)))
        for group in groups.values():
            self._run_task(group[0], self._keep(group))
        if self._config.chaos:
            self._run_task(slots[0], self._faults.run(self._victims))

    def _victims(self) -> dict[str, ChildProcess]:
        """Return the running processes for fault injection, without those that are starting."""
        children = {name: slot.child for name, slot in self._slots.items()}
        return {
            name: child
            for name, child in children.items()
            if isinstance(child, ChildProcess) and child.ready.done() and not child.ended.done()
        }

    def read_steps(self, replica: int, last: int) -> list[StepRecord]:
        """Return the last steps of a replica's scheduler, even if it hangs or has died."""
        try:
            buffer = map_steps(self._workspace.path / f"{STEPS}-{replica}")
        except (OSError, ValueError):  # not ready yet
            return []
        with buffer:
            return read_steps(buffer, last)

    async def close(self) -> None:
        """Stop the children and clean up; idempotent."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        children = [slot.child for slot in self._slots.values()]
        await asyncio.gather(*(child.stop(STOP_PATIENCE_S) for child in children))
        self._release()

    def kill(self) -> None:
        """Kill the children and clean up."""
        self._closed = True
        for slot in self._slots.values():
            slot.child.signal(signal.SIGKILL)
        self._release()

    def _release(self) -> None:
        for slot in self._slots.values():
            slot.child.close()
        if self._hub is not None:
            self._hub.close()
        self._context.destroy(linger=0)
        self._workspace.remove()

    def _spawn_all(self, *, first: bool) -> None:
        count = self._topology.num_replicas
        for replica in range(count):
            for role in self._roles:
                if role.starts_first == first:
                    name = role.name if count == 1 else f"{role.name}-{replica}"
                    child = self._spawn(role, replica, name)
                    self._slots[name] = _Slot(role, replica, name, child)

    def _spawn(self, role: ProcessRole, replica: int, name: str) -> ChildProcess | RemoteNode:
        run = next(self._runs)
        sockets = {ours: f"{link}-{replica}" for ours, link in role.links.items()}
        group_run = self._group_runs.setdefault((replica, role.group), 1)
        if role.node:
            assert self._hub is not None, "there are several machines"
            return self._hub.start(role.node, name, group_run)
        sockets |= {ours: f"{name}-{replica}-{group_run}" for ours, name in role.peers.items()}
        sockets[role.outbox] = f"out-{run}"
        sender: MessageSender[ToScheduler] | None = None
        if role.inbox is not None:
            sockets[role.inbox] = f"in-{run}"
            address = self._workspace.address(sockets[role.inbox])
            sender = AsyncPushSender(self._context, address, MessageEncoder(self._arrays))
        address = self._workspace.address(sockets[role.outbox])
        decoder: MessageDecoder[FromChild] = MessageDecoder(FromChild, self._arrays)
        receiver: AsyncReceiver[FromChild] = AsyncPullReceiver(self._context, [address], decoder)
        if self._faults.delays:
            receiver = DelayedReceiver(receiver, self._faults.delay)
            sender = None if sender is None else DelayedSender(sender, self._faults.delay)
        child = ChildProcess(
            name,
            self._start_process(role),
            receiver,
            sender,
            lambda message: self._deliver(name, message),
        )
        child.configure(
            ChildConfig(
                config=self._config,
                workspace=str(self._workspace.path),
                parent_pid=os.getpid(),
                sockets=sockets,
                reports_loading=self._progress is not None and replica == 0,
                rank=role.rank,
            )
        )
        return child

    def _start_process(self, role: ProcessRole) -> subprocess.Popen[bytes]:
        if self._prewarmed is not None and role.argv == SCHEDULER_ARGV:
            process = self._prewarmed.take()
            if process is not None:
                return process
        return start_process(role.argv, role.environment())

    def _deliver(self, name: str, message: FromChild) -> None:
        slot = self._slots[name]
        if isinstance(message, Loading):
            if self._progress is not None:
                self._progress(message.done, message.total)
        elif isinstance(message, RankRendezvous):
            if self._hub is not None:
                self._hub.set_rendezvous(self._group_runs[slot.replica, slot.role.group], message)
        elif slot.observer is not None:
            slot.observer.on_message(message)

    def _run_task(self, slot: _Slot, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda done: self._on_task_done(slot, done))
        self._tasks.append(task)

    def _on_task_done(self, slot: _Slot, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:  # an internal error: without supervision the process counts as lost
            logger.error("the %s is no longer supervised", slot.name, exc_info=error)
            _observer(slot).on_given_up()

    async def _keep(self, group: Sequence[_Slot]) -> None:
        """Restart the processes of a group each time one exits, as their policy allows."""
        names = ", ".join(slot.name for slot in group)
        backoff = Backoff(group[0].role.restart)
        while True:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait([slot.child.ended for slot in group], return_when=first)
            forgiven = {slot.name for slot in group if self._faults.was_injected(slot.name)}
            for slot in group:  # at once: from now on requests wait for the next processes
                _observer(slot).on_lost(injected=bool(forgiven))
            await self._end(group)
            delay_s = 0.0 if forgiven else backoff.next_delay_s()
            if delay_s is None:
                logger.error("%s died too often; it will not be restarted", names)
                for slot in group:
                    _observer(slot).on_given_up()
                return
            await asyncio.sleep(delay_s)
            self._group_runs[group[0].replica, group[0].role.group] += 1
            for slot in group:
                slot.child = self._spawn(slot.role, slot.replica, slot.name)
            with contextlib.suppress(ConfigError):  # then one exits, which the loop waits for
                readies = await asyncio.gather(*(slot.child.ready for slot in group))
                for slot, ready in zip(group, readies, strict=True):
                    _observer(slot).on_ready(ready, slot.child.send)
                    logger.warning("%s restarted pid=%d", slot.name, slot.child.pid)

    async def _end(self, group: Sequence[_Slot]) -> None:
        """Stop what is left of a group that has lost a process, and clean up."""
        lost = [slot for slot in group if slot.child.ended.done()]
        for slot in group:
            if slot not in lost:
                slot.child.signal(signal.SIGKILL)
        for slot in group:
            child = slot.child
            code = await asyncio.shield(child.ended)
            if slot in lost:
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                logger.error("%s died (%s) pid=%d", slot.name, how, child.pid)
            else:
                logger.error("%s was stopped with its group pid=%d", slot.name, child.pid)
            child.close()
            self._workspace.sweep_arrays(child.pid)

    async def _report_hang(self, slot: _Slot) -> None:
        """Make all processes of the replica print their stacks, and report the last steps."""
        replica = [each for each in self._slots.values() if each.replica == slot.replica]
        for each in replica:
            if not each.child.ended.done():
                each.child.signal(signal.SIGUSR1)
        await asyncio.sleep(_STACKS_S)
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        steps = self.read_steps(slot.replica, REPORTED_STEPS)
        pids = {each.name: each.child.pid for each in replica}
        write_report(self._config.observe.report_dir, slot.name, pids, steps)

    async def _watch(self, slot: _Slot, watchdog: Watchdog) -> None:
        """Kill a hung process after it has printed its stacks, so that `_keep` restarts it."""
        while True:
            await asyncio.sleep(watchdog.interval_s)
            child = slot.child
            hangs = watchdog.hangs(child.heartbeat_s)
            if not hangs or child.ended.done():
                continue
            logger.error("%s hangs; killing it, its stacks follow pid=%d", slot.name, child.pid)
            await self._report_hang(slot)
            child.signal(signal.SIGKILL)
            await asyncio.shield(child.ended)


def _observer(slot: _Slot) -> ProcessObserver:
    assert slot.observer is not None, "set before any process is kept"
    return slot.observer
