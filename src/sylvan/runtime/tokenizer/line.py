"""The line to the processes: the samples they serve, and what to do when one of them is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable

from sylvan.protocol.errors import CapacityError
from sylvan.protocol.messages import (
    Abort,
    Command,
    Control,
    ControlReply,
    Finish,
    FromScheduler,
    Heartbeat,
    Load,
    Submit,
    TextBatch,
    ToScheduler,
)
from sylvan.runtime.tokenizer.live import MAX_LOST_LIVES, SUSPECT_AFTER, LiveRequest, Sample
from sylvan.runtime.tokenizer.types import ModelFacts, State
from sylvan.transport.api import ChannelFullError
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)


class Line:
    """What is being served, in which epoch, by whom.

    Every live sample is in `_samples` under its name of the present epoch, or waits: for a
    scheduler (`connect` gives it to the next one), or as a suspect for its turn. An epoch ends when
    a process is lost; what still arrives under a name of an earlier one is ignored.

    Attributes:
        facts: About the model, from the last `connect`.
        state: What the processes are doing as a whole.
        load: As of the last heartbeat.
        beat_s: Time of the last heartbeat; minus infinity before the first.
        live: Requests by rid that have not ended, or whose end was not read.
        num_samples: Of all of them together.
        observers: Told of each request that is over, whether or not its end was read.
    """

    facts: ModelFacts

    def __init__(self, clock: Clock = monotonic) -> None:
        self.state: State = "starting"
        self.load = Load()
        self.beat_s = -math.inf
        self.live: dict[str, LiveRequest] = {}
        self.num_samples = 0
        self.observers: list[Callable[[LiveRequest], None]] = []
        self._clock = clock
        self._send: Callable[[ToScheduler], None] | None = None
        self._samples: dict[str, tuple[LiveRequest, Sample]] = {}
        self._suspects: deque[tuple[LiveRequest, Sample]] = deque()
        self._suspect: Sample | None = None
        self._epoch = 0
        self._emptied = asyncio.Event()
        self._controls: dict[int, asyncio.Future[ControlReply]] = {}
        self._control_ids = itertools.count(1)

    def connect(self, send: Callable[[ToScheduler], None], facts: ModelFacts) -> None:
        """A scheduler is there: replay what is live to it, and admit requests.

        Whatever was submitted before belongs to an earlier epoch and is ignored from now on.
        """
        self.facts = facts
        self._send = send
        self.beat_s = self._clock()
        if self.state != "draining":
            self.state = "up"
        self._epoch += 1
        self._samples.clear()
        self._suspects.clear()
        self._suspect = None
        for live in tuple(self.live.values()):
            for sample in tuple(live.unfinished()):
                self._replay(live, sample)
        self._try_next_suspect(None)

    def disconnect(self, state: State) -> None:
        """The scheduler is gone; requests wait for `connect`, or with state `lost` end now."""
        self._count_loss()
        self._send = None
        self._samples.clear()
        if state in ("lost", "stopped") or self.state != "draining":
            self.state = state
        for future in self._controls.values():
            if not future.done():
                future.set_exception(CapacityError("the scheduler was lost"))
        if state in ("lost", "stopped"):
            self._end_all(Finish(type="abort", message=f"the engine is {state}", status=503))

    def interrupt(self) -> None:
        """The detokenizer is gone; `reconnect` follows."""
        if self.state == "up":
            self.state = "recovering"

    def reconnect(self) -> None:
        """The detokenizer was lost, the scheduler not: have it start over with what is live."""
        send = self._send
        if send is None:
            return
        for name in self._samples:
            send(Abort(rid=name))
        self._count_loss()
        self.connect(send, self.facts)

    def on_texts(self, batch: TextBatch) -> None:
        """Take in what the detokenizer sent."""
        for part in batch.outputs:
            found = self._samples.get(part.rid)
            if found is None:
                continue  # of an earlier epoch, or its client has gone
            live, sample = found
            sample.accept(part)
            live.notify(sample)
            if sample.finish is not None:
                del self._samples[part.rid]
                self._try_next_suspect(sample)

    def on_reply(self, message: FromScheduler) -> None:
        """Take in what the scheduler sent."""
        if isinstance(message, Heartbeat):
            self.load = message.load
            self.beat_s = self._clock()
        elif isinstance(message, ControlReply):
            future = self._controls.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)

    def drain(self) -> None:
        """Admit no more requests."""
        self.state = "draining"

    async def drained(self) -> None:
        """Wait until no request is live."""
        while self.live:
            self._emptied.clear()
            await self._emptied.wait()

    async def control(self, command: Command, timeout_s: float) -> ControlReply:
        """See `TokenizerManager.control`.

        Raises:
            CapacityError: there is no scheduler now, or it did not answer in time.
        """
        if self._send is None:
            raise CapacityError("the scheduler is being restarted")
        number = next(self._control_ids)
        future = asyncio.get_running_loop().create_future()
        self._controls[number] = future
        try:
            self._send(Control(id=number, command=command))
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            raise CapacityError(f"the scheduler did not answer within {timeout_s:g} s") from error
        finally:
            del self._controls[number]

    def open(self, live: LiveRequest) -> None:
        """Have a new request served.

        Raises:
            ChannelFullError: the scheduler takes no more; nothing of the request is left.
        """
        self.live[live.rid] = live
        self.num_samples += len(live.samples)
        try:
            for sample in tuple(live.unfinished()):
                self._start(live, sample)
        except ChannelFullError:
            self._forget(live)
            raise

    def close(self, live: LiveRequest) -> None:
        """A request is over, or nobody waits for it any more: what still runs is aborted."""
        self._forget(live)
        for observer in self.observers:
            observer(live)

    def _forget(self, live: LiveRequest) -> None:
        if self.live.get(live.rid) is live:
            del self.live[live.rid]
            self.num_samples -= len(live.samples)
            if not self.live:
                self._emptied.set()
        for sample in live.unfinished():
            if self._samples.pop(sample.name, None) is not None:
                self._tell(Abort(rid=sample.name))
            self._try_next_suspect(sample)

    def abort(self, live: LiveRequest, finish: Finish) -> None:
        """End a request; its stream tells when it has ended."""
        for sample in tuple(live.unfinished()):
            sample.aborting = finish
            if self._send is None or sample.name not in self._samples:
                sample.end(finish)
                live.notify(sample)
            else:
                self._tell(Abort(rid=sample.name, finish=finish))

    def _start(self, live: LiveRequest, sample: Sample) -> None:
        """Give a sample to the scheduler, if there is one; otherwise `connect` will."""
        waited_s = self._clock() - live.arrived_s
        request = sample.replay(self._epoch, waited_s)
        self._samples[sample.name] = (live, sample)
        if self._send is not None:
            self._send(Submit(request=request))

    def _replay(self, live: LiveRequest, sample: Sample) -> None:
        if sample.aborting is not None:
            sample.end(sample.aborting)
        elif sample.lost_lives >= MAX_LOST_LIVES:
            logger.error("gave up on a request rid=%s lost=%d", live.rid, sample.lost_lives)
            message = f"the engine was lost {sample.lost_lives} times while serving this request"
            sample.end(Finish(type="abort", message=message, status=500))
        elif sample.lost_lives >= SUSPECT_AFTER:
            self._suspects.append((live, sample))
        else:
            self._start(live, sample)
        live.notify(sample)

    def _try_next_suspect(self, ended: Sample | None) -> None:
        """Replay the next of those that may have killed the engine, once the last one has ended.

        One at a time: whatever kills it does so alone, and the others are innocent.
        """
        if ended is not self._suspect:
            return
        self._suspect = None
        while self._suspects:
            live, sample = self._suspects.popleft()
            if sample.finish is None and self.live.get(live.rid) is live:
                self._suspect = sample
                self._start(live, sample)
                return

    def _count_loss(self) -> None:
        if self._send is not None:
            for _, sample in self._samples.values():
                sample.lost_lives += 1

    def _end_all(self, finish: Finish) -> None:
        for live in self.live.values():
            for sample in tuple(live.unfinished()):
                sample.end(finish)
                live.notify(sample)

    def _tell(self, message: Abort) -> None:
        if self._send is None:
            return
        try:
            self._send(message)
        except ChannelFullError:  # it hangs; whoever restarts it makes it forget this request too
            logger.exception("scheduler takes no messages rid=%s", message.rid)
