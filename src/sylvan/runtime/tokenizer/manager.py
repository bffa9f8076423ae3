"""The interface between clients and schedulers: requests in, streams of samples out."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from sylvan.media.source import MediaSource
from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.protocol.media import MediaItem
from sylvan.protocol.messages import Command, ControlReply, Finish, SchedulerLoad
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.tokenizer.adapters import Adapters, AdapterSettings
from sylvan.runtime.tokenizer.checks import (
    CheckedParams,
    CheckedPrompt,
    PromptIds,
    build_request,
    check_ids,
    check_input,
    check_logprob_room,
)
from sylvan.runtime.tokenizer.continuation import take_over
from sylvan.runtime.tokenizer.embeds import (
    EmbedTexts,
    build_embed,
    check_embed,
    check_generates,
    vector_of,
)
from sylvan.runtime.tokenizer.encoder_prompts import DECODER_PROMPT, encoded_prompt
from sylvan.runtime.tokenizer.isolation import CacheIsolation
from sylvan.runtime.tokenizer.live import LiveRequest, SampleState
from sylvan.runtime.tokenizer.media import MediaPreparer
from sylvan.runtime.tokenizer.router import CONTROL_TIMEOUT_S, ReplicaRouter
from sylvan.runtime.tokenizer.types import (
    EdgeLimits,
    EmbedInput,
    GenerateInput,
    Origin,
    SampleDelta,
    ServedModelInfo,
    State,
    Vector,
)
from sylvan.runtime.tokenizer.weight_updates import WeightUpdates
from sylvan.text.tokenizer import Tokenizer
from sylvan.utils.clock import Clock, monotonic
from sylvan.utils.threads import call_in_pool

CLIENT_ABORT = Finish(type="abort", message="aborted by the client")
NO_ORIGIN = Origin()
_INLINE_CHARS = 2048  # longer texts are tokenised in a thread; shorter ones take under 1 ms
_TOKENIZER_THREADS = 2


class TokenizerManager:
    """Validates and tokenises requests, and streams their samples.

    Lives in the API process, on one asyncio loop; other threads must not call it.
    Keeps prompt and output of every live request, so that losing a process only causes a pause.

    Args:
        router: Serves the requests; default: of one replica.
        adapters: The router's adapters; default: disabled.
        media: Prepares media; default: disabled.

    Attributes:
        tokenizer: The model's tokenizer; thread-safe.
        adapters: LoRA adapters that requests may name.
        limits: Limits and defaults.
        router: Routes to replicas; the supervisor connects its clients.
        isolation: Cache salts of tenants.
        media: Prepares media; closed by its creator. None: media are rejected.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: EdgeLimits | None = None,
        clock: Clock = monotonic,
        router: ReplicaRouter | None = None,
        adapters: Adapters | None = None,
        media: MediaPreparer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.router = router or ReplicaRouter(clock=clock)
        self.adapters = adapters or Adapters(self.router, AdapterSettings())
        self.limits = limits or EdgeLimits()
        self.media = media
        self._clock = clock
        self._reserved = 0
        self._checked = CheckedParams()
        self.isolation = CacheIsolation()
        self.updates = WeightUpdates(self)
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._texts = EmbedTexts(tokenizer, self._pool)

    @property
    def facts(self) -> ServedModelInfo:
        """The served model; valid once `ready`."""
        return self.router.facts

    async def generate(self, inp: GenerateInput) -> AsyncGenerator[SampleDelta, None]:
        """Yield deltas of the `n` samples, interleaved, until all have finished.

        Closing the iterator (or cancelling the task that reads it) aborts the request. Unread
        deltas are merged, so a slow reader costs no memory. Use
        `contextlib.aclosing` around it.

        Raises:
            RequestError: On the first step, if the request is invalid.
            CapacityError: On the first step, if the server is overloaded or not serving.
        """
        live = await self._admit(inp)
        try:
            if inp.past is not None:
                yield SampleDelta(rid=live.rid)
            while not live.done:
                await live.wake.wait()
                for delta in live.drain():
                    yield delta
                    if delta.finish is not None:
                        live.samples[delta.index].delivered_s = self._clock()
        finally:
            self.router.close(live)

    async def embed(self, inp: EmbedInput) -> Vector:
        """Embed a text, or classify it.

        Cancelling the waiting task aborts the request.

        Raises:
            RequestError: The request is invalid, or was aborted by ID.
            CapacityError: The server is overloaded or not serving.
        """
        received_s = self._clock()
        self._check_admission(inp.rid, inp.tenant, 1, inp.priority)
        check_embed(inp, self.facts)
        limit = self._texts.max_tokens(self.facts)
        self._reserved += 1
        try:
            prompt = await self._texts.read(inp, self.facts)
            ids, media = await self._with_media(prompt.ids, inp.media, inp.tenant)
            prompt = replace(prompt, ids=ids)
        finally:
            self._reserved -= 1
        self._check_admission(inp.rid, inp.tenant, 1, inp.priority)
        request = build_embed(inp, prompt, self.facts, inp.rid or secrets.token_hex(16), limit)
        owner = self.isolation.owner(inp.tenant)
        lora = self.adapters.id_of(inp.lora, inp.tenant)
        request = msgspec.structs.replace(request, cache_salt=owner, lora=lora, media=media)
        live = LiveRequest(
            request.rid,
            [SampleState(request)],
            None,
            self._clock(),
            internal=inp.internal,
            received_s=received_s,
            origin=inp.origin or NO_ORIGIN,
        )
        self.router.open(live)
        try:
            while not live.done:
                await live.wake.wait()
                for delta in live.drain():
                    return vector_of(delta, prompt)
        finally:
            self.router.close(live)
        raise AssertionError("a request that is done has delivered its vector")

    def abort(self, rid: str, tenant: str | None = None) -> bool:
        """Abort the live request `rid`; its stream yields a finish of type abort.

        Returns whether there was one. Without a `tenant`, aborts it for all tenants.
        """
        live = [found for found in self.router.live.named(rid) if tenant in (None, found.tenant)]
        for found in live:
            self.router.abort(found, CLIENT_ABORT)
        return bool(live)

    def abort_all(self, finish: Finish = CLIENT_ABORT) -> int:
        """Abort every live request; return their number."""
        live = tuple(self.router.live)
        for found in live:
            self.router.abort(found, finish)
        return len(live)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, trusted: bool = True
    ) -> list[int]:
        """Tokenise a text; long texts do not block the event loop."""
        encode = self.tokenizer.encode if trusted else self.tokenizer.encode_user
        if len(text) <= _INLINE_CHARS:
            return encode(text, add_special_tokens=add_special_tokens)
        return await call_in_pool(self._pool, encode, text, add_special_tokens=add_special_tokens)

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode token IDs.

        Raises:
            RequestError: An ID is outside the vocabulary.
        """
        array = check_ids(ids, self.facts.vocab_size, "tokens").tolist()
        if len(array) <= _INLINE_CHARS:
            return self.tokenizer.decode(array, skip_special_tokens=skip_special_tokens)
        return await call_in_pool(
            self._pool, self.tokenizer.decode, array, skip_special_tokens=skip_special_tokens
        )

    async def control(
        self, command: Command, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> ControlReply:
        """Execute a command in the scheduler of every replica; return one merged reply.

        Raises:
            CapacityError: A scheduler is restarting, or did not answer in time.
        """
        return await self.router.control(command, timeout_s)

    @property
    def state(self) -> State:
        """State of the processes as a whole."""
        return self.router.state

    def load(self) -> SchedulerLoad:
        """Merged load of the schedulers at their last heartbeats."""
        return self.router.load

    def heartbeat_age_s(self) -> float:
        """Seconds since a scheduler's last heartbeat; infinite before the first."""
        return self._clock() - self.router.heartbeat_s

    def alive(self) -> bool:
        """Whether the processes run or are restarting: the answer of /live."""
        return self.state not in ("lost", "stopped")

    def ready(self) -> bool:
        """Whether requests are served and a scheduler sends heartbeats: /ready and /health."""
        return self.router.ready

    @property
    def num_live(self) -> int:
        """Number of requests that run or whose end is unread; samples are not counted."""
        return len(self.router.live)

    def close(self) -> None:
        """Stop everything; nothing may be called afterwards."""
        self.router.stop()
        self.adapters.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _admit(self, inp: GenerateInput) -> LiveRequest:
        received_s = self._clock()
        self._check_admission(inp.rid, inp.tenant, inp.sampling.n, inp.options.priority)
        check_generates(self.facts)
        check_input(inp, self.facts)
        self.adapters.id_of(inp.lora, inp.tenant)
        self._checked.check(inp.sampling, self.facts, self.limits.max_parameter_bytes)
        rid = inp.rid or secrets.token_hex(16)
        # reserve the ID while the text is tokenised
        self._reserved += inp.sampling.n
        try:
            prompt = await self._prompt(inp)
            ids, media = await self._with_media(prompt.ids, inp.media, inp.tenant)
            prompt = CheckedPrompt(ids, prompt.param)
            if self.facts.decoder_prompt or inp.options.decoder_prompt is not None:
                prompt, media = await self._encoded(inp, prompt, media)
        finally:
            self._reserved -= inp.sampling.n
        self._check_admission(inp.rid, inp.tenant, inp.sampling.n, inp.options.priority)
        base = build_request(inp, prompt, self.facts, seed=self._seed(inp))
        check_logprob_room(base, self.limits.max_logprobs)
        return self._submit(inp, base, rid, media, received_s)

    def _seed(self, inp: GenerateInput) -> int:
        for seed in (self.limits.seed, inp.default_seed):
            if seed is not None:
                return seed
        return secrets.randbits(63)

    def _check_admission(self, rid: str | None, tenant: str, count: int, priority: int) -> None:
        state = self.state
        if state not in ("up", "recovering"):
            raise CapacityError(f"no requests are taken: the engine is {state}")
        if rid is not None and self.router.live.get(rid, tenant) is not None:
            raise RequestError(f"a request called {rid!r} is being served", param="rid")
        limit, live = self.limits.max_live_samples, self.router.live.num_samples + self._reserved
        if live + count > limit:
            raise CapacityError(f"{live} samples are being served; at most {limit} can be")
        # reject early what the scheduler would reject
        if (full := self.limits.max_unfinished) is not None and self.router.is_full(full, priority):
            message = f"{full} requests run or wait already; try again later"
            raise CapacityError(message, setting="scheduler.max_waiting_reqs")

    async def _prompt(self, inp: GenerateInput) -> CheckedPrompt:
        if inp.input_ids is not None:
            return CheckedPrompt(inp.input_ids, "input_ids")
        assert inp.text is not None
        ids = await self.tokenize(
            inp.text, add_special_tokens=inp.add_special_tokens, trusted=inp.trusted
        )
        return CheckedPrompt(ids, "text")

    async def _encoded(
        self, inp: GenerateInput, prompt: CheckedPrompt, media: tuple[MediaItem, ...]
    ) -> tuple[CheckedPrompt, tuple[MediaItem, ...]]:
        """Return the prompt of the decoder, and the text for the encoder."""
        if not self.facts.decoder_prompt:
            message = "decoder_prompt: this model has no encoder of texts."
            raise RequestError(message, param=DECODER_PROMPT)
        begins = inp.options.decoder_prompt
        if isinstance(begins, str):
            begins = await self.tokenize(begins, add_special_tokens=False)
        prompt, item = encoded_prompt(prompt, begins, self.facts, media)
        return prompt, (item,)

    async def _with_media(
        self, ids: PromptIds, sources: Sequence[MediaSource], tenant: str
    ) -> tuple[PromptIds, tuple[MediaItem, ...]]:
        """Return the prompt with all tokens of its media, and the media items."""
        if not sources:
            return ids, ()
        if self.media is None or not self.facts.media_tokens:
            [first, *_] = sources
            message = f"{first.path}: this model takes text only, no {first.kind}."
            raise RequestError(message, param=first.path)
        return await self.media.expand(ids, sources, self.facts.media_tokens, tenant)

    def _submit(
        self,
        inp: GenerateInput,
        base: GenerateRequest,
        rid: str,
        media: tuple[MediaItem, ...],
        received_s: float,
    ) -> LiveRequest:
        salt = self.isolation.salt(inp.tenant, inp.cache_salt)
        shared = self.isolation.shared_tokens(base.input_ids) if salt else 0
        interval = base.sampling.stream_interval or self.limits.stream_interval
        interval = interval if inp.stream else None
        base = msgspec.structs.replace(
            base,
            rid=rid,
            lora=self.adapters.id_of(inp.lora, inp.tenant),
            media=media,
            cache_salt=salt,
            shared_tokens=shared,
            interval=interval,
        )
        requests = [base]
        if base.sampling.n > 1 or inp.bootstraps:
            requests = [
                msgspec.structs.replace(base, sample=index, bootstrap=bootstrap)
                for index, bootstrap in enumerate(inp.bootstraps or [None] * base.sampling.n)
            ]
        samples = [SampleState(request) for request in requests]
        take_over(samples, inp.past or (), self.facts.vocab_size)
        live = LiveRequest(
            base.rid,
            samples,
            interval,
            self._clock(),
            internal=inp.internal,
            received_s=received_s,
            origin=inp.origin or NO_ORIGIN,
        )
        self.router.open(live)
        return live
