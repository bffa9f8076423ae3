"""The edge between clients and processes: prompts in, streams of samples out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from sylvan.protocol.errors import CapacityError, RequestError
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
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.tokenizer.checks import Prompt, build_request, check_ids, check_input
from sylvan.runtime.tokenizer.live import MAX_LOST_LIVES, SUSPECT_AFTER, LiveRequest, Sample
from sylvan.runtime.tokenizer.types import EdgeLimits, GenerateInput, ModelFacts, SampleDelta, State
from sylvan.text.tokenizer import Tokenizer
from sylvan.transport.api import ChannelFullError
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

CLIENT_ABORT = Finish(type="abort", message="aborted by the client")
HEARTBEAT_MAX_AGE_S = 2.0
_INLINE_CHARS = 2048  # longer texts are tokenised in a thread; shorter ones take under 1 ms
_TOKENIZER_THREADS = 2


class TokenizerManager:
    """Checks and tokenises what clients ask for, and streams out what the processes answer.

    Lives in the API process, on one asyncio loop; no method may be called from another thread.
    Keeps prompt and ids of every live request, so that the loss of a process is a pause and not an
    error.

    Attributes:
        facts: About the model; valid once `ready`.
        tokenizer: Of the model; safe to share between threads.
    """

    facts: ModelFacts

    def __init__(
        self, tokenizer: Tokenizer, limits: EdgeLimits | None = None, clock: Clock = monotonic
    ) -> None:
        self.tokenizer = tokenizer
        self._limits = limits or EdgeLimits()
        self._clock = clock
        self._send: Callable[[ToScheduler], None] | None = None
        self._state: State = "starting"
        self._live: dict[str, LiveRequest] = {}
        self._samples: dict[str, tuple[LiveRequest, Sample]] = {}
        self._emptied = asyncio.Event()
        self._epoch = 0
        self._suspects: deque[tuple[LiveRequest, Sample]] = deque()
        self._suspect: Sample | None = None
        self._reserved = 0
        self._load = Load()
        self._beat_s = -math.inf
        self._controls: dict[int, asyncio.Future[ControlReply]] = {}
        self._control_ids = itertools.count(1)
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")

    async def generate(self, inp: GenerateInput) -> AsyncGenerator[SampleDelta, None]:
        """Yield what is new of each of the `n` samples, interleaved, until all have finished.

        Closing the iterator (or cancelling the task that reads it) aborts the request. Deltas that
        the reader leaves unread are merged, so a slow reader costs no memory. Use
        `contextlib.aclosing` around it.

        Raises:
            RequestError: on the first step, if the request cannot be served at all.
            CapacityError: on the first step, if too much is going on, or nothing is served now.
        """
        live = await self._admit(inp)
        try:
            while not live.done:
                await live.wake.wait()
                for delta in live.take():
                    yield delta
        finally:
            self._close(live)

    def abort(self, rid: str) -> bool:
        """End the live request of that name; its stream yields a finish of type abort.

        Returns whether there was one.
        """
        live = self._live.get(rid)
        if live is None:
            return False
        self._abort(live, CLIENT_ABORT)
        return True

    def abort_all(self, finish: Finish = CLIENT_ABORT) -> int:
        """End every live request; returns how many there were."""
        for live in tuple(self._live.values()):
            self._abort(live, finish)
        return len(self._live)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, trusted: bool = True
    ) -> list[int]:
        """Token ids of a text; long texts do not hold up the event loop."""
        encode = self.tokenizer.encode if trusted else self.tokenizer.encode_user
        if len(text) <= _INLINE_CHARS:
            return encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: encode(text, add_special_tokens=add_special_tokens)
        )

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        array = check_ids(ids, self.facts.vocab_size, "tokens").tolist()
        if len(array) <= _INLINE_CHARS:
            return self.tokenizer.decode(array, skip_special_tokens=skip_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool,
            lambda: self.tokenizer.decode(array, skip_special_tokens=skip_special_tokens),
        )

    async def control(self, command: Command, *, timeout_s: float = 30.0) -> ControlReply:
        """Have the scheduler carry out a command (FlushCache, GetState, Pause, Resume).

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

    @property
    def state(self) -> State:
        """What the processes are doing as a whole."""
        return self._state

    def load(self) -> Load:
        """How busy the scheduler was at its last heartbeat."""
        return self._load

    def heartbeat_age_s(self) -> float:
        """Seconds since the scheduler last showed life; infinite before the first time."""
        return self._clock() - self._beat_s

    def alive(self) -> bool:
        """Whether the children run, or are being restarted: the answer of /live."""
        return self._state not in ("lost", "stopped")

    def ready(self) -> bool:
        """Whether requests are admitted now: the answer of /ready and, by heartbeat, /health."""
        return self._state == "up" and self.heartbeat_age_s() < HEARTBEAT_MAX_AGE_S

    @property
    def num_live(self) -> int:
        """Requests that have not finished, or whose end was not read; samples are not counted."""
        return len(self._live)

    def connect(self, send: Callable[[ToScheduler], None], facts: ModelFacts) -> None:
        """A scheduler is there: replay what is live to it, and admit requests.

        Whatever was submitted before belongs to an earlier epoch and is ignored from now on.
        """
        self.facts = facts
        self._send = send
        self._beat_s = self._clock()
        if self._state != "draining":
            self._state = "up"
        self._epoch += 1
        self._samples.clear()
        self._suspects.clear()
        self._suspect = None
        for live in tuple(self._live.values()):
            for sample in tuple(live.unfinished()):
                self._replay(live, sample)
        self._try_next_suspect(None)

    def disconnect(self, state: State) -> None:
        """The scheduler is gone; requests wait for `connect`, or with state `lost` end now."""
        self._count_loss()
        self._send = None
        self._samples.clear()
        if state in ("lost", "stopped") or self._state != "draining":
            self._state = state
        for future in self._controls.values():
            if not future.done():
                future.set_exception(CapacityError("the scheduler was lost"))
        if state in ("lost", "stopped"):
            self._end_all(Finish(type="abort", message=f"the engine is {state}", status=503))

    def reconnect(self) -> None:
        """The detokenizer was lost, the scheduler not: have it start over with what is live."""
        send = self._send
        if send is None:
            return
        for name in self._samples:
            send(Abort(rid=name))
        self._count_loss()
        self.connect(send, self.facts)

    def interrupt(self) -> None:
        """The detokenizer is gone; `reconnect` follows."""
        if self._state == "up":
            self._state = "recovering"

    def drain(self) -> None:
        """Admit no more requests."""
        self._state = "draining"

    async def drained(self) -> None:
        """Wait until no request is live."""
        while self._live:
            self._emptied.clear()
            await self._emptied.wait()

    def close(self) -> None:
        """End everything; nothing may be called afterwards."""
        self.disconnect("stopped")
        self._pool.shutdown(wait=False, cancel_futures=True)

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
            self._load = message.load
            self._beat_s = self._clock()
        elif isinstance(message, ControlReply):
            future = self._controls.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)

    async def _admit(self, inp: GenerateInput) -> LiveRequest:
        self._check_admission(inp)
        check_input(inp, self.facts)
        rid = inp.rid or secrets.token_hex(16)
        # the place is taken while the text is tokenised
        self._reserved += inp.sampling.n
        try:
            prompt = await self._prompt(inp)
        finally:
            self._reserved -= inp.sampling.n
        self._check_admission(inp)
        seed = secrets.randbits(63) if self._limits.seed is None else self._limits.seed
        base = build_request(inp, prompt, self.facts, seed=seed)
        return self._submit(inp, msgspec.structs.replace(base, rid=rid))

    def _check_admission(self, inp: GenerateInput) -> None:
        if self._state not in ("up", "recovering"):
            raise CapacityError(f"no requests are taken: the engine is {self._state}")
        if inp.rid is not None and inp.rid in self._live:
            raise RequestError(f"a request called {inp.rid!r} is being served", param="rid")
        most, live = self._limits.max_live_samples, len(self._samples) + self._reserved
        if live + inp.sampling.n > most:
            raise CapacityError(f"{live} samples are being served; at most {most} can be")

    async def _prompt(self, inp: GenerateInput) -> Prompt:
        if inp.input_ids is not None:
            return Prompt(inp.input_ids, "input_ids")
        assert inp.text is not None
        ids = await self.tokenize(
            inp.text, add_special_tokens=inp.add_special_tokens, trusted=inp.trusted
        )
        return Prompt(ids, "text")

    def _submit(self, inp: GenerateInput, base: GenerateRequest) -> LiveRequest:
        samples = [
            Sample(msgspec.structs.replace(base, sample=index), "")
            for index in range(base.sampling.n)
        ]
        interval = base.sampling.stream_interval or self._limits.stream_interval
        live = LiveRequest(base.rid, samples, interval if inp.stream else None, self._clock())
        self._live[base.rid] = live
        try:
            for sample in samples:
                self._start(live, sample)
        except BaseException:
            self._close(live)
            raise
        return live

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
            if sample.finish is None and self._live.get(live.rid) is live:
                self._suspect = sample
                self._start(live, sample)
                return

    def _count_loss(self) -> None:
        if self._send is not None:
            for _, sample in self._samples.values():
                sample.lost_lives += 1

    def _abort(self, live: LiveRequest, finish: Finish) -> None:
        for sample in tuple(live.unfinished()):
            sample.aborting = finish
            if self._send is None or sample.name not in self._samples:
                sample.end(finish)
                live.notify(sample)
            else:
                self._tell(Abort(rid=sample.name, finish=finish))

    def _end_all(self, finish: Finish) -> None:
        for live in self._live.values():
            for sample in tuple(live.unfinished()):
                sample.end(finish)
                live.notify(sample)

    def _close(self, live: LiveRequest) -> None:
        """Forget a request; what still runs of it is aborted."""
        if self._live.get(live.rid) is live:
            del self._live[live.rid]
            if not self._live:
                self._emptied.set()
        for sample in live.unfinished():
            if self._samples.pop(sample.name, None) is not None:
                self._tell(Abort(rid=sample.name))
            self._try_next_suspect(sample)

    def _tell(self, message: Abort) -> None:
        if self._send is None:
            return
        try:
            self._send(message)
        except ChannelFullError:  # it hangs; whoever restarts it makes it forget this request too
            logger.exception("scheduler takes no messages rid=%s", message.rid)
