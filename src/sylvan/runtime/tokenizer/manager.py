"""The edge between clients and processes: prompts in, streams of samples out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.protocol.messages import Command, ControlReply, Finish, Load
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.tokenizer.checks import Prompt, build_request, check_ids, check_input
from sylvan.runtime.tokenizer.embeds import (
    EmbedTexts,
    build_embed,
    check_embed,
    check_generates,
    vector_of,
)
from sylvan.runtime.tokenizer.isolation import CacheIsolation
from sylvan.runtime.tokenizer.line import Line
from sylvan.runtime.tokenizer.live import LiveRequest, Sample
from sylvan.runtime.tokenizer.past import take_over
from sylvan.runtime.tokenizer.types import (
    EdgeLimits,
    EmbedInput,
    GenerateInput,
    ModelFacts,
    SampleDelta,
    State,
    Vector,
)
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.clock import Clock, monotonic

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
        tokenizer: Of the model; safe to share between threads.
        line: For whoever runs the processes.
    """

    def __init__(
        self, tokenizer: Tokenizer, limits: EdgeLimits | None = None, clock: Clock = monotonic
    ) -> None:
        self.tokenizer = tokenizer
        self.line = Line(clock)
        self._limits = limits or EdgeLimits()
        self._clock = clock
        self._reserved = 0
        self.isolation = CacheIsolation()
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._texts = EmbedTexts(tokenizer, self._pool)

    @property
    def facts(self) -> ModelFacts:
        """About the model; valid once `ready`."""
        return self.line.facts

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
            if inp.past is not None:
                yield SampleDelta(rid=live.rid)
            while not live.done:
                await live.wake.wait()
                for delta in live.take():
                    yield delta
        finally:
            self.line.close(live)

    async def embed(self, inp: EmbedInput) -> Vector:
        """The vector of a text, or the numbers of its labels.

        Cancelling the task that waits aborts the request.

        Raises:
            RequestError: the request cannot be served at all, or was aborted by name.
            CapacityError: too much is going on, or nothing is served now.
        """
        self._check_admission(inp.rid, 1)
        check_embed(inp, self.facts)
        most = self._texts.most(self.facts)
        self._reserved += 1
        try:
            prompt = await self._texts.read(inp, most)
        finally:
            self._reserved -= 1
        self._check_admission(inp.rid, 1)
        request = build_embed(inp, prompt, self.facts, inp.rid or secrets.token_hex(16), most)
        owner = self.isolation.owner(inp.tenant)
        request = msgspec.structs.replace(request, cache_salt=owner)
        live = LiveRequest(request.rid, [Sample(request, "")], None, self._clock())
        self.line.open(live)
        try:
            while not live.done:
                await live.wake.wait()
                for delta in live.take():
                    return vector_of(delta, prompt)
        finally:
            self.line.close(live)
        raise AssertionError("a request that is done was taken")

    def abort(self, rid: str, tenant: str | None = None) -> bool:
        """End the live request of that name; its stream yields a finish of type abort.

        Returns whether there was one, of `tenant` if that is given.
        """
        live = self.line.live.get(rid)
        if live is None or tenant not in (None, live.tenant):
            return False
        self.line.abort(live, CLIENT_ABORT)
        return True

    def abort_all(self, finish: Finish = CLIENT_ABORT) -> int:
        """End every live request; returns how many there were."""
        for live in tuple(self.line.live.values()):
            self.line.abort(live, finish)
        return len(self.line.live)

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
        return await self.line.control(command, timeout_s)

    @property
    def state(self) -> State:
        """What the processes are doing as a whole."""
        return self.line.state

    def load(self) -> Load:
        """How busy the scheduler was at its last heartbeat."""
        return self.line.load

    def heartbeat_age_s(self) -> float:
        """Seconds since the scheduler last showed life; infinite before the first time."""
        return self._clock() - self.line.beat_s

    def alive(self) -> bool:
        """Whether the children run, or are being restarted: the answer of /live."""
        return self.state not in ("lost", "stopped")

    def ready(self) -> bool:
        """Whether requests are admitted now: the answer of /ready and, by heartbeat, /health."""
        return self.state == "up" and self.heartbeat_age_s() < HEARTBEAT_MAX_AGE_S

    @property
    def num_live(self) -> int:
        """Requests that have not finished, or whose end was not read; samples are not counted."""
        return len(self.line.live)

    def close(self) -> None:
        """End everything; nothing may be called afterwards."""
        self.line.disconnect("stopped")
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _admit(self, inp: GenerateInput) -> LiveRequest:
        self._check_admission(inp.rid, inp.sampling.n)
        check_generates(self.facts)
        check_input(inp, self.facts)
        rid = inp.rid or secrets.token_hex(16)
        # the place is taken while the text is tokenised
        self._reserved += inp.sampling.n
        try:
            prompt = await self._prompt(inp)
        finally:
            self._reserved -= inp.sampling.n
        self._check_admission(inp.rid, inp.sampling.n)
        given = (self._limits.seed, inp.default_seed)
        seed = next((seed for seed in given if seed is not None), secrets.randbits(63))
        base = build_request(inp, prompt, self.facts, seed=seed)
        return self._submit(inp, msgspec.structs.replace(base, rid=rid))

    def _check_admission(self, rid: str | None, count: int) -> None:
        if self.state not in ("up", "recovering"):
            raise CapacityError(f"no requests are taken: the engine is {self.state}")
        if rid is not None and rid in self.line.live:
            raise RequestError(f"a request called {rid!r} is being served", param="rid")
        most, live = self._limits.max_live_samples, self.line.num_samples + self._reserved
        if live + count > most:
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
        salt = self.isolation.salt(inp.tenant, inp.cache_salt)
        shared = self.isolation.shared_tokens(base.input_ids) if salt else 0
        interval = base.sampling.stream_interval or self._limits.stream_interval
        interval = interval if inp.stream else None
        base = msgspec.structs.replace(
            base, cache_salt=salt, shared_tokens=shared, interval=interval
        )
        samples = [
            Sample(msgspec.structs.replace(base, sample=index), "")
            for index in range(base.sampling.n)
        ]
        take_over(samples, inp.past or (), self.facts.vocab_size)
        live = LiveRequest(base.rid, samples, interval, self._clock())
        self.line.open(live)
        return live
