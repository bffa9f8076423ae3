"""Runs a scheduler on messages: takes requests in, steps, sends outputs and signs of life."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.protocol.messages import (
    Abort,
    CachePrompts,
    CacheRequest,
    CacheTree,
    Control,
    ControlReply,
    Finish,
    FlushCache,
    FromScheduler,
    GetState,
    Heartbeat,
    Inspection,
    OpenText,
    PassOn,
    Pause,
    Resume,
    StopFound,
    Submit,
    ToDetokenizer,
    TokenBatch,
    TokenOutput,
    ToScheduler,
)
from sylvan.protocol.requests import GenerateRequest, Request
from sylvan.runtime.engine.composition import Composition
from sylvan.runtime.engine.throughput import Throughput
from sylvan.transport.api import MessageError, Receiver, Sender
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.4
AUDIT_S = 10.0
MAX_MESSAGES_PER_STEP = 1024  # so that a flood of requests does not hold up those that run
PROMPT_TAIL_TOKENS = 16
MAX_FAILED_STEPS = 3
_SHORTEST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.05

Facts = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class Ports:
    """The ends that a scheduler process holds."""

    inbox: Receiver[ToScheduler]
    text: Sender[ToDetokenizer]
    replies: Sender[FromScheduler]

    def emit(self, outputs: Sequence[TokenOutput]) -> None:
        """What `Parts.emit` is to be."""
        self.text.send(TokenBatch(outputs=tuple(outputs)))

    def close(self) -> None:
        """Let go of all ends."""
        self.inbox.close()
        self.text.close()
        self.replies.close()


class SchedulerLoop:
    """The scheduler process without the process.

    A request that cannot be served fails alone. A step that raises fails the requests it ran; a
    scheduler that keeps raising is left to the supervisor, which starts another one.

    Args:
        built: The scheduler, which emits through `ports.emit`, and what can be told of it.
        ports: Where messages come from and go to.
        at_rest: Called when nothing has come for a while after some work was done.
    """

    def __init__(
        self,
        built: Composition,
        ports: Ports,
        clock: Clock = monotonic,
        at_rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._built = built
        self._scheduler = built.scheduler
        self._ports = ports
        self._clock = clock
        self._at_rest = at_rest
        self._paused = False
        self._rests_at_s: float | None = None  # unless work comes; None: nothing was done since
        self._beat_due_s = 0.0
        self._throughput = Throughput(clock())
        self._audit_due_s = clock() + AUDIT_S
        self._wait_s = 0.0
        self._failed_steps = 0
        self._settled = True  # an idle scheduler has had its last step
        self._shutdown = False

    def run(self) -> None:
        """Serve until told to shut down."""
        while not self._shutdown:
            self.pump()

    def pump(self, *, wait: bool = True) -> bool:
        """One iteration; False once told to shut down, and nothing may be called then.

        With `wait` it blocks while there is nothing to do, but never past the next heartbeat.
        """
        self._beat()
        self._take_messages(self._patience() if wait else 0.0)
        if not self._shutdown:
            progressed = self._step()
            longer = min(max(2 * self._wait_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
            self._wait_s = 0.0 if progressed else longer
        return not self._shutdown

    @property
    def idle(self) -> bool:
        """Whether nothing happens until a message arrives."""
        return self._scheduler.idle

    def _patience(self) -> float:
        if not self._scheduler.idle:
            return self._wait_s
        return max(0.0, self._beat_due_s - self._clock())

    def _beat(self) -> None:
        now = self._clock()
        if now >= self._beat_due_s:
            self._beat_due_s = now + HEARTBEAT_S
            if not self._scheduler.idle:
                self._scheduler.tell()
                self._ports.text.send(PassOn())
            self._tell_load(now)

    def _tell_load(self, now_s: float) -> None:
        load = self._throughput.told(self._scheduler.load(), now_s)
        load = msgspec.structs.replace(
            load, num_grammar_reqs=self._built.num_grammar_reqs(), paused=self._paused
        )
        self._ports.replies.send(Heartbeat(load=load))

    def _take_messages(self, timeout_s: float) -> None:
        controls: list[Control] = []
        for _ in range(MAX_MESSAGES_PER_STEP):
            try:
                message = self._ports.inbox.receive(timeout_s)
            except MessageError:
                logger.exception("message dropped")
                continue
            if message is None:
                break
            timeout_s, self._wait_s = 0.0, 0.0
            if isinstance(message, Control):
                controls.append(message)
            else:
                self._handle(message)
        # after the rest: what a client was told has ended has ended here too
        for control in controls:
            self._control(control)

    def _handle(self, message: Submit | Abort | StopFound) -> None:
        match message:
            case Submit():
                self._submit(message.request)
            case Abort():
                self._scheduler.abort(message.rid, message.finish)
            case StopFound():
                self._scheduler.stop_at(message.rid, message.num_tokens, message.matched)

    def _submit(self, request: Request) -> None:
        self._ports.text.send(_open_text(request))
        try:
            self._scheduler.add(request)
        except RequestError as error:
            self._refuse(request, str(error), error.status, error.param)
        except CapacityError as error:
            self._refuse(request, str(error), error.status)
        except Exception:
            logger.exception("request failed on arrival rid=%s", request.rid)
            self._refuse(request, "the scheduler failed on this request", 500)

    def _refuse(
        self, request: Request, message: str, status: int, param: str | None = None
    ) -> None:
        finish = Finish(type="abort", message=message, status=status, param=param)
        self._ports.emit((TokenOutput(rid=request.rid, finish=finish),))

    def _step(self) -> bool:
        if self._scheduler.idle and self._settled:
            self._rest()
            return True
        self._rests_at_s = self._beat_due_s + HEARTBEAT_S
        try:
            progressed = self._scheduler.step()
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
            logger.exception("step failed; the requests it ran are ended")
            self._fail_running(f"{type(error).__name__} in the engine")
            return True
        self._failed_steps = 0
        rests = self._scheduler.idle and not progressed and not self._settled
        if rests:
            self._beat_due_s = 0.0  # the load has come to rest; tell it
        if rests or self._clock() >= self._audit_due_s:
            self._audit_due_s = self._clock() + AUDIT_S
            if self._scheduler.audit():
                self._beat_due_s = 0.0
        self._settled = not progressed
        return progressed

    def _rest(self) -> None:
        if self._rests_at_s is not None and self._clock() >= self._rests_at_s:
            self._rests_at_s = None
            self._at_rest()

    def _fail_running(self, reason: str) -> None:
        finish = Finish(type="abort", message=reason, status=500)
        for req in tuple(self._scheduler.running):
            logger.error("request ended by a failed step rid=%s", req.rid)
            self._scheduler.abort(req.rid, finish)

    def _control(self, control: Control) -> None:
        reply = ControlReply(id=control.id, ok=True)
        match control.command:
            case FlushCache():
                if not self._scheduler.flush_cache():
                    busy = "the cache is in use: requests are running or waiting"
                    reply = ControlReply(id=control.id, ok=False, message=busy)
            case GetState():
                load = msgspec.to_builtins(self._scheduler.load())
                reply = ControlReply(
                    id=control.id, ok=True, body={**self._built.state(), "load": load}
                )
            case CacheTree() | CacheRequest() | CachePrompts():
                reply = self._inspected(control.id, control.command)
            case Pause(mode=mode):
                count = self._scheduler.pause(mode)
                self._set_paused(True)
                reply = ControlReply(id=control.id, ok=True, body={"num_paused_requests": count})
            case Resume():
                self._scheduler.resume()
                self._set_paused(False)
            case _:
                self._shutdown = True
        self._ports.replies.send(reply)

    def _set_paused(self, paused: bool) -> None:
        """Tell it at once: whoever is told that the command was carried out sees its effect."""
        self._paused = paused
        self._tell_load(self._clock())

    def _inspected(self, number: int, command: Inspection) -> ControlReply:
        body = self._built.inspect(command)
        if body is None:
            return ControlReply(id=number, ok=False, message="nothing is known of that")
        return ControlReply(id=number, ok=True, body=dict(body))


def _open_text(request: Request) -> OpenText:
    if not isinstance(request, GenerateRequest):
        return OpenText(rid=request.rid, prompt_tail_ids=())
    sampling = request.sampling
    return OpenText(
        rid=request.rid,
        prompt_tail_ids=tuple(request.input_ids[-PROMPT_TAIL_TOKENS:].tolist()),
        output_ids=tuple(request.output_ids.tolist()),
        interval=request.interval,
        stop=sampling.stop,
        stop_regex=sampling.stop_regex,
        no_stop_trim=sampling.no_stop_trim,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
    )
