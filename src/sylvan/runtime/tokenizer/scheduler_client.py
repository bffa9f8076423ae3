"""Client of one scheduler: submits samples, receives outputs, and replays after a loss."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from sylvan.protocol.commands import DiskTensors, UpdateWeights
from sylvan.protocol.errors import CapacityError
from sylvan.protocol.messages import (
    DEFAULT_VERSION,
    Abort,
    Command,
    Control,
    ControlReply,
    Finish,
    FromScheduler,
    Heartbeat,
    Pause,
    Resume,
    SchedulerLoad,
    Submit,
    TextBatch,
    ToScheduler,
)
from sylvan.protocol.steps import StepRecord
from sylvan.runtime.tokenizer.live import MAX_LOSSES, SUSPECT_AFTER, LiveRequest, SampleState
from sylvan.runtime.tokenizer.types import ReplicaState, ServedModelInfo
from sylvan.transport.api import ChannelFullError
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

Send = Callable[[ToScheduler], None]


class SchedulerClient:
    """Client of the scheduler of one replica, and of the detokenizer behind it.

    A sample that runs is registered under its name in the current epoch, or waits: for the
    processes (all samples are submitted once both are up), or as a suspect for its turn. An epoch
    ends when a process is lost; outputs under a name of an earlier epoch are ignored.

    Belongs to the event loop of the API process.

    Args:
        replica: Number of the replica, from 0.
        hand_over: Called with the remaining requests when the replica is given up.

    Attributes:
        state: State of the replica's processes.
        facts: The served model, from the last `connect`; None before the first.
        load: Load at the last heartbeat.
        heartbeat_s: Time of the last heartbeat; minus infinity before the first.
        num_samples: Number of samples of this client's requests.
        weight_version: Version label of the weights, from the last reply that contained it.
        read_steps: Returns recent steps of the scheduler; set by the supervisor.
        reminders: Called on each `connect`; return commands that the scheduler runs first.
    """

    def __init__(
        self,
        replica: int,
        hand_over: Callable[[Sequence[LiveRequest]], None],
        clock: Clock = monotonic,
    ) -> None:
        self.replica = replica
        self.state: ReplicaState = "starting"
        self.facts: ServedModelInfo | None = None
        self.load = SchedulerLoad()
        self.heartbeat_s = -math.inf
        self.num_samples = 0
        self.weight_version = DEFAULT_VERSION
        self.read_steps: Callable[[int], list[StepRecord]] = lambda last: []
        self.reminders: list[Callable[[ServedModelInfo], Sequence[Command]]] = []
        self._hand_over = hand_over
        self._clock = clock
        self._send: Send | None = None
        self._has_detokenizer = True
        self._live: dict[LiveRequest, None] = {}  # in order of arrival
        self._samples: dict[str, tuple[LiveRequest, SampleState]] = {}
        self._suspects: deque[tuple[LiveRequest, SampleState]] = deque()
        self._suspect: SampleState | None = None
        self._epoch = 0
        self._paused = False
        self._checkpoint: UpdateWeights | None = None  # last source of the weights
        self._replies: dict[int, asyncio.Future[ControlReply]] = {}
        self._control_ids = itertools.count(1)

    def connect(self, send: Send, facts: ServedModelInfo) -> None:
        """The scheduler is ready: submit all live and later requests to it.

        What was submitted before belongs to an earlier epoch and is ignored from now on. The new
        scheduler also gets a pause in force, and a checkpoint that replaced the weights; weights
        updated in other ways are lost.
        """
        self.facts = facts
        self.weight_version = str(facts.extra.get("weight_version") or DEFAULT_VERSION)
        self._send = send
        self.heartbeat_s = self._clock()
        for reminder in self.reminders:
            for command in reminder(facts):
                self._run_control(send, command)
        if self._checkpoint is not None:
            self._run_control(send, self._checkpoint)
            self.weight_version = self._checkpoint.version or self.weight_version
        if self._paused:
            self._run_control(send, Pause(mode="in_place"))
        self._resume()

    def is_full(self, limit: int, priority: int) -> bool:
        """Whether `limit` samples are unfinished, none of them less urgent than `priority`."""
        return len(self._samples) >= limit and all(
            sample.request.priority >= priority for _, sample in self._samples.values()
        )

    def disconnect(self, *, injected: bool = False) -> None:
        """The scheduler was lost; requests wait for `connect`.

        Args:
            injected: By fault injection: no request is to blame.
        """
        self._lose_samples(injected=injected)
        self._send = None
        self.load = SchedulerLoad()
        self._set_recovering()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(CapacityError("the scheduler was lost"))

    def detokenizer_lost(self, *, injected: bool = False) -> None:
        """The detokenizer was lost; requests wait for `detokenizer_ready`; see `disconnect`."""
        for name in self._samples:
            self._try_send(Abort(rid=name))
        self._lose_samples(injected=injected)
        self._has_detokenizer = False
        self._set_recovering()

    def detokenizer_ready(self) -> None:
        """The detokenizer is ready: restart all live requests in the scheduler."""
        if not self._has_detokenizer:
            self._has_detokenizer = True
            self._resume()

    def give_up(self) -> None:
        """A process of the replica will not be restarted: hand its requests over."""
        self.disconnect()
        self.state = "lost"
        left = tuple(self._live)
        self._live.clear()
        self._suspects.clear()
        self._suspect = None
        self.num_samples = 0
        self._hand_over(left)

    def on_texts(self, batch: TextBatch) -> None:
        """Receive outputs of the detokenizer."""
        now = self._clock()
        for part in batch.outputs:
            found = self._samples.get(part.rid)
            if found is None:
                continue  # of an earlier epoch, or its client disconnected
            live, sample = found
            sample.accept(part, now)
            live.notify(sample)
            if sample.finish is not None:
                del self._samples[part.rid]
                self._replay_next_suspect(sample)

    def on_message(self, message: FromScheduler) -> None:
        """Receive a heartbeat or reply of the scheduler."""
        if isinstance(message, Heartbeat):
            self.load = message.load
            self.heartbeat_s = self._clock()
        elif isinstance(message, ControlReply):
            future = self._replies.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)

    def open(self, live: LiveRequest) -> None:
        """Submit a new request, now or once the processes are up.

        Raises:
            ChannelFullError: The scheduler's channel is full; the request leaves no trace.
        """
        self._add(live)
        try:
            for sample in tuple(live.unfinished()):
                self._submit(live, sample)
        except ChannelFullError:
            self.close(live)
            raise

    def adopt(self, live: LiveRequest) -> None:
        """Continue a request of a replica that was given up."""
        self._add(live)
        if self._serving:
            self._replay(live)
            self._replay_next_suspect(None)

    def close(self, live: LiveRequest) -> None:
        """Close a request that lost its reader: abort what still runs."""
        if live in self._live:
            del self._live[live]
            self.num_samples -= len(live.samples)
        for sample in live.unfinished():
            self._withdraw(sample, Abort(rid=sample.name))

    def abort(self, live: LiveRequest, finish: Finish) -> None:
        """Abort a request; its samples end once the scheduler confirms it."""
        for sample in tuple(live.unfinished()):
            sample.aborting = finish
            if sample.name in self._samples:
                self._try_send(Abort(rid=sample.name, finish=finish))
            else:
                sample.end(finish)
                live.notify(sample)

    def end(self, live: LiveRequest, finish: Finish) -> None:
        """End a request at once, whatever the scheduler is doing."""
        left = tuple(live.unfinished())
        live.end(finish)
        for sample in left:
            self._withdraw(sample, Abort(rid=sample.name, finish=finish))

    def check_connected(self) -> None:
        """Check that commands can be sent.

        Raises:
            CapacityError: There is no scheduler now.
        """
        if self._send is None:
            raise CapacityError("the scheduler is being restarted")

    async def control(self, command: Command, timeout_s: float) -> ControlReply:
        """Execute a command in the scheduler.

        Raises:
            CapacityError: There is no scheduler now, or it did not answer in time.
        """
        self.check_connected()
        assert self._send is not None
        number = next(self._control_ids)
        future = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        try:
            self._send(Control(id=number, command=command))
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            raise CapacityError(f"the scheduler did not answer within {timeout_s:g} s") from error
        finally:
            del self._replies[number]
        if reply.ok and isinstance(command, Pause | Resume):
            self._paused = isinstance(command, Pause)
        if reply.ok and isinstance(command, UpdateWeights):
            whole = isinstance(command.source, DiskTensors) and not command.partial
            self._checkpoint = msgspec.structs.replace(command, abort=False) if whole else None
        if reply.ok and reply.body and "weight_version" in reply.body:
            self.weight_version = reply.body["weight_version"]
        return reply

    def _run_control(self, send: Send, command: Command) -> None:
        """Send a command without waiting for its reply."""
        send(Control(id=next(self._control_ids), command=command))

    @property
    def _serving(self) -> bool:
        return self._send is not None and self._has_detokenizer

    def _set_recovering(self) -> None:
        if self.state != "lost":
            self.state = "recovering"

    def _resume(self) -> None:
        """Start an epoch: submit all live requests again."""
        if not self._serving:
            return
        self.state = "up"
        self._epoch += 1
        self._samples.clear()
        self._suspects.clear()
        self._suspect = None
        for live in tuple(self._live):
            self._replay(live)
        self._replay_next_suspect(None)

    def _add(self, live: LiveRequest) -> None:
        self._live[live] = None
        self.num_samples += len(live.samples)

    def _submit(self, live: LiveRequest, sample: SampleState) -> None:
        """Send a sample to the scheduler if the processes are up; otherwise `_resume` will."""
        if self._send is None or not self._has_detokenizer:
            return
        waited_s = self._clock() - live.arrived_s
        request = sample.continuation(live.serial, self._epoch, waited_s)
        self._send(Submit(request=request))
        self._samples[sample.name] = (live, sample)

    def _replay(self, live: LiveRequest) -> None:
        for sample in tuple(live.unfinished()):
            if sample.aborting is not None:
                sample.end(sample.aborting)
            elif sample.suspicions >= MAX_LOSSES:
                logger.error("gave up on a request rid=%s losses=%d", live.rid, sample.losses)
                message = f"the engine was lost {sample.losses} times while serving this request"
                sample.end(Finish(type="abort", message=message, status=500))
            elif sample.suspicions >= SUSPECT_AFTER:
                self._suspects.append((live, sample))
            else:
                self._resubmit(live, sample)
            live.notify(sample)

    def _resubmit(self, live: LiveRequest, sample: SampleState) -> None:
        try:
            self._submit(live, sample)
        except ChannelFullError as error:
            sample.end(Finish(type="abort", message=str(error), status=503))

    def _replay_next_suspect(self, ended: SampleState | None) -> None:
        """Once the last suspect has ended, replay the next one.

        One at a time: a request that kills the engine then does so alone, which clears the others.
        """
        if ended is not self._suspect:
            return
        self._suspect = None
        while self._suspects:
            live, sample = self._suspects.popleft()
            if sample.finish is None and live in self._live:
                self._resubmit(live, sample)
                live.notify(sample)
                if sample.finish is None:
                    self._suspect = sample
                    return

    def _withdraw(self, sample: SampleState, message: Abort) -> None:
        """Forget a sample, here and in the scheduler."""
        if self._samples.pop(sample.name, None) is not None:
            self._try_send(message)
        self._replay_next_suspect(sample)

    def _lose_samples(self, *, injected: bool) -> None:
        """Handle the loss of a process that served all registered samples."""
        for _, sample in self._samples.values():
            sample.losses += 1
            sample.suspicions += not injected
        self._samples.clear()

    def _try_send(self, message: Abort) -> None:
        if self._send is None:
            return
        try:
            self._send(message)
        except ChannelFullError:  # it hangs; after the restart, the sample is not submitted
            logger.exception("the scheduler's channel is full rid=%s", message.rid)
