"""Runs a scheduler on messages: receives requests, steps, sends outputs and heartbeats."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sylvan.protocol.commands import ExecutorCommand, LoadAdapter, UpdateWeights
from sylvan.protocol.errors import CapacityError, RankLostError, RequestError, SylvanError
from sylvan.protocol.messages import (
    DEFAULT_VERSION,
    Abort,
    AddCorpus,
    CachePrompts,
    CacheRequest,
    CacheTree,
    Command,
    Control,
    ControlReply,
    CorpusCommand,
    Finish,
    FlushCache,
    FlushText,
    FromScheduler,
    GetState,
    Heartbeat,
    ListCorpora,
    Params,
    Pause,
    RegisterAdapter,
    RemoveCorpus,
    Resume,
    SetWeightVersion,
    Shutdown,
    StartDetokenizing,
    StopFound,
    Submit,
    ToDetokenizer,
    TokenBatch,
    TokenOutput,
    ToScheduler,
    UnloadAdapter,
)
from sylvan.protocol.requests import GenerateRequest, Request
from sylvan.protocol.shared_params import ParamsReceiver
from sylvan.protocol.tiers import TierCommand
from sylvan.runtime.engine.commands import Commands
from sylvan.runtime.engine.engine_core import EngineCore
from sylvan.runtime.engine.rebalancing import OWN, Rebalancing
from sylvan.runtime.engine.throughput import ThroughputMeter
from sylvan.transport.api import MessageError, MessageReceiver, MessageSender
from sylvan.utils.clock import Clock, monotonic, process_cpu
from sylvan.utils.tasks import outcome_of

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.4
AUDIT_S = 10.0
MAX_MESSAGES_PER_STEP = 1024  # so that many arrivals do not delay running requests
PROMPT_TAIL_TOKENS = 16
MAX_FAILED_STEPS = 3
_GATHER_S = 0.001
"""How long an idle scheduler waits for another request after the first of a burst."""
_GATHER_AT_MOST_S = 0.005
_GATHER_SHARE = 0.05  # share of a step; shorter steps wait for nothing
_MIN_WAIT_S = 0.001
_MAX_WAIT_S = 0.05

Facts = Mapping[str, str | int | float | bool | None]


@dataclass(slots=True)
class Ports:
    """The channels of a scheduler process.

    `weight_version` is the version label of the weights that compute outputs.
    """

    inbox: MessageReceiver[ToScheduler]
    text: MessageSender[ToDetokenizer]
    replies: MessageSender[FromScheduler]
    weight_version: str = DEFAULT_VERSION

    def emit(self, outputs: Sequence[TokenOutput]) -> None:
        """Send outputs to the detokenizer; implements `SchedulerDeps.emit`."""
        self.text.send(TokenBatch(outputs=tuple(outputs), weight_version=self.weight_version))

    def close(self) -> None:
        """Close all channels."""
        self.inbox.close()
        self.text.close()
        self.replies.close()


class SchedulerLoop:
    """The main loop of the scheduler process.

    A request or command that cannot be served fails alone. A step that raises fails its requests;
    if the scheduler keeps raising, this process exits and the supervisor restarts it.

    Args:
        built: The scheduler, which emits through `ports.emit`, and its state.
        ports: Channels for messages.
        on_idle: Called once when no work has arrived for a heartbeat or two.
    """

    def __init__(
        self,
        built: EngineCore,
        ports: Ports,
        clock: Clock = monotonic,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._built = built
        self._scheduler = built.scheduler
        self._ports = ports
        self._params = ParamsReceiver()
        self._clock = clock
        self._on_idle = on_idle
        self._paused = False
        self._commands = Commands(built.scheduler, built.executor)
        self._rebalancing = Rebalancing(built.parallel)
        ports.weight_version = built.weight_version
        self._idle_at_s: float | None = None  # when to call `on_idle`; None: no work since then
        self._heartbeat_due_s = 0.0
        self._throughput = ThroughputMeter(clock())
        self._audit_due_s = clock() + AUDIT_S
        self._wait_s = 0.0
        self._failed_steps = 0
        self._quiescent = True  # the scheduler is idle, and its last step was empty
        self._shutdown = False

    def run(self) -> None:
        """Serve until a `Shutdown` command."""
        while not self._shutdown:
            self.pump()

    def pump(self, *, wait: bool = True) -> bool:
        """Run one iteration; returns False after a `Shutdown`, and must not be called again then.

        With `wait` it blocks while there is nothing to do, at most until the next heartbeat.
        """
        self._send_heartbeat()
        self._receive_messages(self._timeout_s() if wait else 0.0)
        self._send_tier_replies()
        if not self._shutdown:
            progressed = self._commands.active and self._advance_commands()
            if not self._commands.stops_steps:
                progressed = self._step() or progressed
            limit = _MIN_WAIT_S if self._scheduler.wants_step_soon() else _MAX_WAIT_S
            longer = min(max(2 * self._wait_s, _MIN_WAIT_S), limit)
            self._wait_s = 0.0 if progressed else longer
        return not self._shutdown

    @property
    def idle(self) -> bool:
        """Whether nothing can happen until a message arrives."""
        return self._scheduler.idle

    def _timeout_s(self) -> float:
        if not self._scheduler.idle or self._commands.active:
            return self._wait_s
        return max(0.0, self._heartbeat_due_s - self._clock())

    def _send_heartbeat(self) -> None:
        now = self._clock()
        if now >= self._heartbeat_due_s:
            self._heartbeat_due_s = now + HEARTBEAT_S
            if not self._scheduler.idle:
                self._scheduler.flush_outputs()
                self._ports.text.send(FlushText())
            self._send_load(now)

    def _send_load(self, now_s: float) -> None:
        load = self._throughput.with_rates(self._scheduler.load(), now_s)
        load = msgspec.structs.replace(
            load,
            **self._built.grammar_counts(),
            **self._built.media_counts(),
            **self._built.bucket_counts(),
            **(self._built.lora.counts if self._built.lora else {}),
            draft_seconds_saved=self._built.draft_seconds_saved(),
            cpu_seconds=process_cpu(),
            paused=self._paused or bool(self._commands.blocked),
            tiers=self._built.stores.load() if self._built.stores is not None else None,
            disagg=self._built.disagg_load(),
        )
        self._ports.replies.send(Heartbeat(load=load))

    def _receive_messages(self, timeout_s: float) -> None:
        """Handle the messages that have arrived.

        Requests of a burst do not arrive at once, and those that miss a step wait for all of it.
        So an idle scheduler with long steps waits a moment for the request after the first.
        """
        controls: list[Control] = []
        gathers = self._scheduler.idle and _GATHER_SHARE * self._scheduler.times.last_s >= _GATHER_S
        gather_until_s: float | None = None
        for _ in range(MAX_MESSAGES_PER_STEP):
            try:
                message = self._ports.inbox.receive(timeout_s)
            except MessageError:
                logger.exception("message dropped")
                continue
            if message is None:
                break
            timeout_s, self._wait_s = 0.0, 0.0
            if isinstance(message, Control) and isinstance(message.command, ExecutorCommand):
                self._commands.add(message.id, message.command)
            elif isinstance(message, Control) and isinstance(message.command, TierCommand):
                self._add_tier_command(message.id, message.command)
            elif isinstance(message, Control):
                controls.append(message)
            else:
                self._handle(message)
                if gathers and isinstance(message, Submit):
                    now = self._clock()
                    if gather_until_s is None:
                        gather_until_s = now + _GATHER_AT_MOST_S
                    timeout_s = max(0.0, min(_GATHER_S, gather_until_s - now))
        # after all others: a request whose end the client has seen has also ended here
        for control in controls:
            self._ports.replies.send(self._reply(control))

    def _handle(self, message: Submit | Params | Abort | StopFound) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Params():
                self._params.keep(message)
            case Abort():
                self._scheduler.abort(message.rid, message.finish)
            case StopFound():
                self._scheduler.stop_at(message.rid, message.num_tokens, message.matched)

    def _submit(self, message: Submit) -> None:
        try:
            request = self._params.request(message)
        except KeyError:  # the message that carried them was malformed
            self._ports.text.send(_start_detokenizing(message.request))
            self._refuse(message.request, "the sampling parameters did not arrive", 500)
            return
        self._ports.text.send(_start_detokenizing(request))
        match self._attempt(lambda: self._scheduler.add(request), f"request {request.rid}"):
            case None:
                return
            case RequestError() as error:
                self._refuse(request, str(error), error.status, error.param)
            case CapacityError() as error:
                self._refuse(request, str(error), error.status)
            case _:
                self._refuse(request, "the scheduler failed on this request", 500)

    def _attempt(self, call: Callable[[], object], what: str) -> Exception | None:
        """Run a call made for one client; return its error, which affects only that client."""
        outcome = outcome_of(call)
        if not isinstance(outcome, Exception):
            return None
        if not isinstance(outcome, SylvanError):
            logger.error("%s failed", what, exc_info=outcome)
        return outcome

    def _refuse(
        self, request: Request, message: str, status: int, param: str | None = None
    ) -> None:
        finish = Finish(type="abort", message=message, status=status, param=param)
        self._ports.emit((TokenOutput(rid=request.rid, finish=finish),))

    def _step(self) -> bool:
        if self._scheduler.idle and self._quiescent:
            self._check_idle()
            return True
        self._idle_at_s = self._heartbeat_due_s + HEARTBEAT_S
        try:
            progressed = self._scheduler.step()
        except RankLostError:  # no request is to blame; the live ones continue elsewhere
            raise
        except Exception as error:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
            logger.exception("step failed; its requests fail")
            self._fail_running(f"{type(error).__name__} in the engine")
            return True
        self._failed_steps = 0
        if progressed:
            self._rebalancing.on_step(self._commands)
        drained = self._scheduler.idle and not progressed and not self._quiescent
        if drained:
            self._heartbeat_due_s = 0.0  # report the final load at once
        if drained or self._clock() >= self._audit_due_s:
            self._audit_due_s = self._clock() + AUDIT_S
            if self._scheduler.audit():
                self._heartbeat_due_s = 0.0
        self._quiescent = not progressed
        return progressed

    def _check_idle(self) -> None:
        if self._idle_at_s is not None and self._clock() >= self._idle_at_s:
            self._idle_at_s = None
            self._on_idle()

    def _fail_running(self, reason: str) -> None:
        finish = Finish(type="abort", message=reason, status=500)
        for req in tuple(self._scheduler.running):
            logger.error("request ended by a failed step rid=%s", req.rid)
            self._scheduler.abort(req.rid, finish)

    def _add_tier_command(self, number: int, command: TierCommand) -> None:
        """Queue a store command; it is answered once the store is open or closed."""
        if self._built.stores is not None:
            self._built.stores.add(number, command)
            return
        message = "there are no KV tiers: start the server with --enable-hierarchical-cache"
        self._ports.replies.send(ControlReply(id=number, ok=False, message=message, status=400))

    def _send_tier_replies(self) -> None:
        for reply in self._built.stores.take_replies() if self._built.stores else ():
            self._ports.replies.send(reply)

    def _reply(self, control: Control) -> ControlReply:
        reply = ControlReply(
            id=control.id, ok=False, message="the scheduler failed on this command"
        )

        def execute() -> None:
            nonlocal reply
            reply = self._execute(control.id, control.command)

        error = self._attempt(execute, f"command {type(control.command).__name__}")
        if isinstance(error, SylvanError):
            status = getattr(error, "status", reply.status)
            return msgspec.structs.replace(reply, message=str(error), status=status)
        return reply

    def _execute(self, number: int, command: Command) -> ControlReply:
        body: Mapping[str, Any] | None = None
        match command:
            case FlushCache():
                if not self._scheduler.flush_cache():
                    raise CapacityError("the cache is in use: requests are running or waiting")
            case GetState():
                load = msgspec.to_builtins(self._scheduler.load())
                body = {**self._built.state(), "load": load}
            case CacheTree() | CacheRequest() | CachePrompts():
                body = self._built.inspect(command)
                if body is None:
                    raise RequestError("the prefix cache cannot answer that", status=404)
            case Pause() | Resume() | SetWeightVersion():
                body = self._set_state(command)
            case RegisterAdapter() | UnloadAdapter() | AddCorpus() | RemoveCorpus() | ListCorpora():
                body = self._execute_optional(command)
            case Shutdown():
                self._shutdown = True
            case _:
                raise RequestError(f"unknown command {type(command).__name__}")
        return ControlReply(id=number, ok=True, body=None if body is None else dict(body))

    def _execute_optional(
        self, command: RegisterAdapter | UnloadAdapter | CorpusCommand
    ) -> Mapping[str, Any] | None:
        """Execute commands of adapters and corpora, which may not be served."""
        lora, corpora = self._built.lora, self._built.corpora
        if isinstance(command, RegisterAdapter | UnloadAdapter):
            if lora is None:
                raise RequestError("LoRA is off (--enable-lora)")
            return lora.execute(command, self._scheduler)
        if corpora is None:
            raise RequestError("corpora are only used with --speculative-algorithm ngram")
        return corpora.execute(command)

    def _set_state(self, command: Pause | Resume | SetWeightVersion) -> Mapping[str, Any] | None:
        match command:
            case Pause(mode=mode):
                count = self._scheduler.pause(mode)
                self._set_paused(True)
                return {"num_paused_requests": count}
            case Resume():
                if self._commands.blocked:
                    raise CapacityError(self._commands.blocked)
                if not self._commands.stops_steps:
                    self._scheduler.resume()
                self._set_paused(False)
                return None
            case SetWeightVersion(version=version):
                self._set_version(version)
                return {"weight_version": version}

    def _advance_commands(self) -> bool:
        """Execute executor commands instead of steps; return whether one is done."""
        done = self._commands.poll()
        if done is None:
            return False
        number, command, result = done
        if isinstance(command, LoadAdapter) and not result.error and self._built.lora is not None:
            result = self._built.lora.loaded(command, result)
        body = dict(result.body)
        if isinstance(command, UpdateWeights) and not result.error:
            if command.version is not None:
                self._set_version(command.version)
            body |= {"weight_version": self._ports.weight_version}
            if self._built.stores is not None:
                self._built.stores.weights_changed()
            load = self._scheduler.load()
            body |= {"num_paused_requests": load.num_running_reqs + load.num_waiting_reqs}
        if not (self._commands.blocked or self._paused):
            self._scheduler.resume()
        if number == OWN:
            self._rebalancing.on_done(result)
            return True
        self._ports.replies.send(
            ControlReply(
                id=number,
                ok=not result.error,
                message=result.error,
                status=result.status,
                body=body,
            )
        )
        return True

    def _set_version(self, version: str) -> None:
        """Set the version label; everything computed before carries the old one."""
        self._scheduler.flush_outputs()
        self._ports.weight_version = version

    def _set_paused(self, paused: bool) -> None:
        """Set the pause mode, and send the load at once, so that the caller sees the effect."""
        self._paused = paused
        self._send_load(self._clock())


def _start_detokenizing(request: Request) -> StartDetokenizing:
    if not isinstance(request, GenerateRequest):
        return StartDetokenizing(rid=request.rid, prompt_tail_ids=())
    sampling = request.sampling
    return StartDetokenizing(
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
