"""Live requests: the received output of each sample, and the output delivered to the client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.media import encoded_tokens, media_tokens
from sylvan.protocol.messages import Finish, TextOutput, Timing, TokenLogprobs, Usage
from sylvan.protocol.names import internal_name
from sylvan.protocol.requests import GenerateRequest, Request
from sylvan.runtime.tokenizer.types import Origin, SampleDelta
from sylvan.utils.tasks import SingleWaiterEvent

SUSPECT_AFTER = 2  # losses after which a sample is replayed alone
MAX_LOSSES = 3  # losses after which it fails
_NOTHING_USED = Usage()


@dataclass(slots=True, eq=False)
class PendingDelta:
    """Outputs of a sample that its client has not read yet."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None
    embedding: np.ndarray | None = None

    def add(self, part: TextOutput) -> None:
        """Append an output."""
        if part.text:
            self.texts.append(part.text)
        self.ids.extend(part.output.token_ids)
        if part.output.logprobs is not None:
            self.logprobs.append(part.output.logprobs)
        if part.output.prompt_logprobs is not None:
            self.prompt_logprobs = part.output.prompt_logprobs
        if part.output.embedding is not None:
            self.embedding = part.output.embedding


@dataclass(slots=True, eq=False)
class SampleState:
    """State of one sample of a request.

    Attributes:
        request: The original request; never changes.
        name: Its internal name in the current epoch; empty before it is submitted.
        output_ids: All received IDs, whether or not the client has read them.
        losses: Number of processes lost while they served this sample.
        suspicions: How many of these the sample may have caused.
        finish: Finish reason, once it has ended.
        aborting: Finish of an abort, until the scheduler confirms it.
        weight_versions: Version labels of the weights that generated its outputs, in order.
        finish_delivered: Whether the client got the finish.
        first_s: Arrival time of its first text; 0: none yet.
        last_s: Arrival time of its finish.
        media_tokens: See `Usage.media_tokens`.
        encoded_tokens: Tokens of the text that the encoder reads; they count as prompt tokens.
        delivered_s: When the reader had processed its last delta.
        stages: See `timeline.stages`, which stores them here once the request is closed.
    """

    request: Request
    name: str = ""
    output_ids: list[int] = field(default_factory=list)
    losses: int = 0
    suspicions: int = 0
    usage: Usage = _NOTHING_USED
    finish: Finish | None = None
    timing: Timing | None = None
    aborting: Finish | None = None
    weight_versions: list[str] = field(default_factory=list)
    has_prompt_logprobs: bool = False
    first_delivered: bool = False
    finish_delivered: bool = False
    first_s: float = 0.0
    last_s: float = 0.0
    delivered_s: float = 0.0
    stages: Any = None
    pending: PendingDelta = field(default_factory=PendingDelta)
    media_tokens: dict[str, int] | None = None
    encoded_tokens: int = 0

    def __post_init__(self) -> None:
        request = self.request
        if request.media:
            self.media_tokens = media_tokens(request.input_ids, request.media) or None
            self.encoded_tokens = encoded_tokens(request.media)

    @property
    def index(self) -> int:
        """Index of the sample in its request, from 0."""
        return self.request.sample if isinstance(self.request, GenerateRequest) else 0

    def accept(self, part: TextOutput, now_s: float) -> None:
        """Add an output of the detokenizer, which arrived at `now_s`."""
        self.first_s = self.first_s or now_s
        if part.output.prompt_logprobs is not None:
            if self.has_prompt_logprobs:  # a replay recomputed them
                output = msgspec.structs.replace(part.output, prompt_logprobs=None)
                part = msgspec.structs.replace(part, output=output)
            self.has_prompt_logprobs = True
        if part.weight_version is not None and part.weight_version not in self.weight_versions[-1:]:
            self.weight_versions.append(part.weight_version)
        self.pending.add(part)
        self.output_ids.extend(part.output.token_ids)
        self.usage = self._merged(part.output.usage)
        if part.output.finish is not None:
            self.finish, self.timing = part.output.finish, part.output.timing
            self.last_s = now_s

    def end(self, finish: Finish) -> None:
        """Finish it here, without waiting for the scheduler."""
        if self.finish is None:
            self.finish = finish
            self.usage = msgspec.structs.replace(
                self.usage,
                prompt_tokens=len(self.request.input_ids),
                completion_tokens=len(self.output_ids),
            )

    def continuation(self, serial: int, epoch: int, waited_s: float) -> Request:
        """Return the request for the remaining output, named for `epoch`."""
        request = self.request
        self.name = internal_name(request.rid, self.index, serial, epoch)
        left_s = None if request.deadline_s is None else max(request.deadline_s - waited_s, 0.001)
        if not isinstance(request, GenerateRequest):
            return msgspec.structs.replace(request, rid=self.name, deadline_s=left_s)
        logprobs = request.logprobs
        if logprobs is not None and self.has_prompt_logprobs:
            logprobs = msgspec.structs.replace(logprobs, start=None)
        return msgspec.structs.replace(
            request,
            rid=self.name,
            output_ids=np.array(self.output_ids, np.int32) if self.output_ids else EMPTY_IDS,
            logprobs=logprobs,
            deadline_s=left_s,
            # after a loss, the other server's transfer is gone
            bootstrap=None if self.losses else request.bootstrap,
        )

    def is_due(self, interval: int) -> bool:
        """Whether the client should get a delta now."""
        if self.finish_delivered:
            return False
        count = len(self.pending.ids)
        if self.finish is not None or count >= interval:
            return True
        return count > 0 and not self.first_delivered

    def drain(self, rid: str) -> SampleDelta:
        """Return everything pending as one delta."""
        pending, self.pending = self.pending, PendingDelta()
        usage = self.usage
        if self.media_tokens is not None:
            usage = msgspec.structs.replace(usage, media_tokens=self.media_tokens)
        if self.encoded_tokens:
            total = usage.prompt_tokens + self.encoded_tokens
            usage = msgspec.structs.replace(usage, prompt_tokens=total)
        self.first_delivered, self.finish_delivered = True, self.finish is not None
        return SampleDelta(
            rid=rid,
            index=self.index,
            text="".join(pending.texts),
            token_ids=tuple(pending.ids),
            logprobs=_concatenated(pending.logprobs),
            prompt_logprobs=pending.prompt_logprobs,
            usage=usage,
            finish=self.finish,
            timing=self.timing,
            embedding=pending.embedding,
            weight_versions=tuple(self.weight_versions),
        )

    def _merged(self, usage: Usage) -> Usage:
        if not self.losses:
            return usage
        # keep the counts that the client saw before the loss
        return msgspec.structs.replace(
            usage,
            cached_tokens=self.usage.cached_tokens if self.output_ids else usage.cached_tokens,
            loaded_tokens=self.usage.loaded_tokens if self.output_ids else usage.loaded_tokens,
            host_tokens=self.usage.host_tokens if self.output_ids else usage.host_tokens,
            retractions=max(usage.retractions, self.usage.retractions),
        )


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that is running, or whose end the client has not read.

    Attributes:
        rid: The client's request ID; unique among the tenant's live requests.
        samples: One or more.
        interval: IDs per delta; None: one delta per sample, at its end.
        arrived_s: When it was validated and tokenised.
        internal: One of our own requests, such as a health probe; not counted in metrics.
        serial: Number of the request in this process; part of its internal names.
        received_s: When it arrived; 0: same as `arrived_s`.
        origin: Its call.
        closed_s: When its reader left or finished; 0: it is still read.
        replica: The replica that it was first sent to.
        ended: See `ended.ended`, which stores it here.
        wake: Set when a delta is due.
        request: Request of its first sample; the others differ in `sample` only.
        tenant: Its tenant.
    """

    rid: str
    samples: list[SampleState]
    interval: int | None
    arrived_s: float
    internal: bool = False
    serial: int = 0
    received_s: float = 0.0
    origin: Origin = field(default_factory=Origin)
    closed_s: float = 0.0
    replica: int = 0
    ended: Any = None
    wake: SingleWaiterEvent = field(default_factory=SingleWaiterEvent)
    request: Request = field(init=False)
    tenant: str = field(init=False)

    def __post_init__(self) -> None:
        self.request = self.samples[0].request
        self.tenant = self.request.tenant

    @property
    def done(self) -> bool:
        """Whether everything was delivered."""
        if len(self.samples) == 1:
            return self.samples[0].finish_delivered
        return all(sample.finish_delivered for sample in self.samples)

    def unfinished(self) -> Iterator[SampleState]:
        """Samples that have not ended."""
        return (sample for sample in self.samples if sample.finish is None)

    def end(self, finish: Finish) -> None:
        """Finish its remaining samples here, without waiting for the scheduler."""
        for sample in tuple(self.unfinished()):
            sample.end(finish)
            self.notify(sample)

    def notify(self, sample: SampleState) -> None:
        """Wake the reader if a delta is due."""
        if self._is_due(sample):
            self.wake.set()

    def drain(self) -> list[SampleDelta]:
        """Return the due deltas; wait on `wake` before the next call."""
        self.wake.clear()
        return [sample.drain(self.rid) for sample in self.samples if self._is_due(sample)]

    def _is_due(self, sample: SampleState) -> bool:
        if self.interval is None:
            return sample.finish is not None and not sample.finish_delivered
        return sample.is_due(self.interval)


class LiveTable:
    """The live requests of a process, by request ID within each tenant.

    Attributes:
        num_samples: Number of samples of all requests.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._by_rid: dict[str, dict[str, LiveRequest]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[LiveRequest]:
        return (live for same_rid in self._by_rid.values() for live in same_rid.values())

    def get(self, rid: str, tenant: str) -> LiveRequest | None:
        """Return a tenant's request `rid`."""
        return self._by_rid.get(rid, {}).get(tenant)

    def named(self, rid: str) -> tuple[LiveRequest, ...]:
        """Return the requests called `rid`, at most one per tenant."""
        return tuple(self._by_rid.get(rid, {}).values())

    def add(self, live: LiveRequest) -> None:
        """Add a request; its ID must be unused by its tenant."""
        assert self.get(live.rid, live.tenant) is None
        self._by_rid.setdefault(live.rid, {})[live.tenant] = live
        self._size += 1
        self.num_samples += len(live.samples)

    def discard(self, live: LiveRequest) -> bool:
        """Remove a request; return whether it existed."""
        if self.get(live.rid, live.tenant) is not live:
            return False
        same_rid = self._by_rid[live.rid]
        del same_rid[live.tenant]
        if not same_rid:
            del self._by_rid[live.rid]
        self._size -= 1
        self.num_samples -= len(live.samples)
        return True


def _concatenated(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    if len(parts) < 2:
        return parts[0] if parts else None

    def rows(name: str) -> np.ndarray | None:
        arrays = [array for part in parts if (array := getattr(part, name)) is not None]
        return np.concatenate(arrays) if arrays else None

    return TokenLogprobs(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_ids=rows("top_ids"),
        top_logprobs=rows("top_logprobs"),
        chosen_logprobs=rows("chosen_logprobs"),
    )
