"""Messages between the API, scheduler and detokenizer processes: one tagged union per direction.

    API -> scheduler         ToScheduler
    scheduler -> detokenizer ToDetokenizer
    detokenizer -> API       TextBatch       (everything about a request takes this way)
    detokenizer -> scheduler StopFound
    scheduler -> API         ControlReply, Heartbeat

Everything is a delta: token ids and texts are those new since the last message of that request.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from sylvan.protocol.commands import ExecutorCommand
from sylvan.protocol.disagg import DisaggLoad
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.protocol.tiers import TierCommand, TierLoad

DEFAULT_VERSION = "default"
"""Label of weights without a given label."""
FinishType = Literal["stop", "length", "abort"]


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended.

    `matched` is the token id, stop string or regex that ended it. For an abort, `status` is the
    HTTP status, or None if the client requested it.
    """

    type: FinishType
    matched: int | str | None = None
    length: int | None = None
    message: str = ""
    status: int | None = None
    param: str | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a run of P consecutive positions (natural log).

    The first prompt token has none: NaN in `logprobs`, and no alternatives (-1 in `top_ids`). A
    request for zero tokens gets one row of `top_ids` and `chosen_logprobs`, for the next token.
    """

    token_ids: np.ndarray  # int32 (P,)
    logprobs: np.ndarray  # float32 (P,)
    top_ids: np.ndarray | None = None  # int32 (P, top)
    top_logprobs: np.ndarray | None = None  # float32 (P, top)
    chosen_logprobs: np.ndarray | None = None  # float32 (P, len(options.token_ids))


class DraftCounts(msgspec.Struct, frozen=True, gc=False):
    """Statistics of speculative decoding for a request.

    `histogram[n]` counts the steps that verified draft tokens and found the first n of them right.
    """

    proposed: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()

    def verified(self, proposed: int, accepted: int) -> DraftCounts:
        """Add one step that verified that many draft tokens."""
        counts = [*self.histogram, *[0] * (accepted + 1 - len(self.histogram))]
        counts[accepted] += 1
        return DraftCounts(self.proposed + proposed, self.accepted + accepted, tuple(counts))


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Counts of a request so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    loaded_tokens: int = 0  # of these, tokens loaded from a KV store
    host_tokens: int = 0  # of these, tokens loaded from host memory
    retractions: int = 0
    drafts: DraftCounts | None = None  # None: no draft tokens were verified
    media_tokens: dict[str, int] | None = None  # prompt tokens by kind of item; None: no items
    taken_back: int = 0  # sampled tokens that broke the schema and were removed from the output


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Monotonic-clock seconds at which a request passed each point; 0: not yet."""

    received: float = 0.0  # by the scheduler
    started: float = 0.0  # first slice launched
    first_token: float = 0.0
    finished: float = 0.0


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New output of one request since the last message."""

    rid: str
    token_ids: tuple[int, ...] = ()
    usage: Usage = Usage()
    logprobs: TokenLogprobs | None = None  # of `token_ids`
    prompt_logprobs: TokenLogprobs | None = None  # only in the first output
    embedding: np.ndarray | None = None  # float32
    finish: Finish | None = None
    timing: Timing | None = None  # only with the finish


class TextOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A `TokenOutput` with its text. `token_ids` excludes those cut after a stop string."""

    rid: str
    text: str
    output: TokenOutput
    weight_version: str | None = None  # set when it differs from the last output's


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """The outputs that a step emits, computed with the weights labelled `weight_version`."""

    outputs: tuple[TokenOutput, ...]
    weight_version: str = DEFAULT_VERSION


class StartDetokenizing(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Detokenize the outputs of `rid` until its finish; sent before its first tokens.

    `output_ids` were detokenized before a restart: they restore the state and produce no text.
    `interval` is the request's.
    """

    rid: str
    prompt_tail_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    interval: int | None = 1
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


class FlushText(msgspec.Struct, frozen=True, kw_only=True, tag="flush_text"):
    """Send the buffered text of requests whose `interval` is None."""


ToDetokenizer = TokenBatch | StartDetokenizing | FlushText


class TextBatch(msgspec.Struct, frozen=True, kw_only=True, tag="texts"):
    """Outputs with their text, for the API process."""

    outputs: tuple[TextOutput, ...]


class Params(msgspec.Struct, frozen=True, kw_only=True, tag="params"):
    """Sampling parameters shared by later requests; they replace those of `slot`."""

    slot: int
    sampling: SamplingParams


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Queue a request.

    With `params`, its sampling parameters come from that slot, except `max_new_tokens` and
    `sampling_seed`.
    """

    request: GenerateRequest | EmbedRequest
    params: int | None = None


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End a request in any state; unknown rids are ignored."""

    rid: str
    finish: Finish = Finish(type="abort", message="aborted by the client")


class StopFound(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The text of `rid` reached a stop string or regex after `num_tokens` output tokens.

    The scheduler ends the request there; later tokens enter neither usage nor cache. `matched` is
    None if a request with stops ended without one in its text: the scheduler keeps its memory until
    this message.
    """

    rid: str
    num_tokens: int
    matched: str | None


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag="flush"):
    """Empty the prefix cache; refused while requests run."""


class GetState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Report load, memory and limits."""


class CacheTree(msgspec.Struct, frozen=True, kw_only=True, tag="cache_tree"):
    """Describe the prefix tree, at most `max_nodes` of it.

    With an `owner`, show only namespaces whose salt starts with it.
    """

    max_nodes: int = 1000
    owner: str | None = None


class CacheRequest(msgspec.Struct, frozen=True, kw_only=True, tag="cache_request"):
    """Explain the cache hit of the prompt of `rid`, and why it was not longer.

    With an `owner`, requests of others are unknown.
    """

    rid: str
    owner: str | None = None


class CachePrompts(msgspec.Struct, frozen=True, kw_only=True, tag="cache_prompts"):
    """Return hashes of the blocks of recent prompts, to compute hit rates."""


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Stop scheduling. `abort` ends all requests, `retract` frees their memory first."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Continue scheduling."""


class SetWeightVersion(msgspec.Struct, frozen=True, kw_only=True, tag="weight_version"):
    """Set the label of the current weights."""

    version: str


class RegisterAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="register_adapter"):
    """Allow requests to name a known adapter by its id; it is read on first use.

    `num_bytes` is the size that `LoadAdapter` reported.
    """

    id: str
    path: str
    num_bytes: int
    pinned: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Reject new requests with an adapter; with `abort`, running ones end now."""

    id: str
    abort: bool = False


class AddCorpus(msgspec.Struct, frozen=True, kw_only=True, tag="add_corpus"):
    """Add texts to draft from; they replace texts of the same name."""

    id: str
    texts: tuple[tuple[int, ...], ...]


class RemoveCorpus(msgspec.Struct, frozen=True, kw_only=True, tag="remove_corpus"):
    """Remove the texts with this name."""

    id: str


class ListCorpora(msgspec.Struct, frozen=True, kw_only=True, tag="list_corpora"):
    """List the texts to draft from, with their token counts."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Leave the scheduler loop; the only command that does."""


CorpusCommand = AddCorpus | RemoveCorpus | ListCorpora
Inspection = CacheTree | CacheRequest | CachePrompts
Command = (
    FlushCache
    | GetState
    | Inspection
    | Pause
    | Resume
    | SetWeightVersion
    | TierCommand
    | Shutdown
    | RegisterAdapter
    | UnloadAdapter
    | CorpusCommand
    | ExecutorCommand
)


class Control(msgspec.Struct, frozen=True, kw_only=True, tag="control"):
    """A command; its `ControlReply` carries the same `id`."""

    id: int
    command: Command


ToScheduler = Submit | Params | Abort | Control | StopFound


class ControlReply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """Outcome of a `Control`: on failure, `message` is the reason and `status` the HTTP status.

    `body` is JSON-like.
    """

    id: int
    ok: bool
    message: str = ""
    status: int = 503
    body: dict[str, Any] | None = None


class SchedulerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a scheduler is. All lengths in tokens unless named otherwise."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0  # held by running requests
    num_cached_tokens: int = 0  # in the prefix tree, evictable
    max_total_num_tokens: int = 0
    steps: int = 0
    computed_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    retractions: int = 0
    verified_drafts: int = 0  # slices with draft tokens that steps verified
    proposed_draft_tokens: int = 0  # the draft tokens in them
    accepted_draft_tokens: int = 0  # drafted tokens that were accepted
    # estimated seconds saved, minus the cost of drafting and verifying
    draft_seconds_saved: float = 0.0
    targets_set: int = 0  # finished requests that had a latency target
    targets_met: int = 0  # of these, requests that met it: goodput
    repaired_pages: int = 0  # leaked pages that audits reclaimed
    repaired_locks: int = 0  # wrong locks of tree nodes that audits repaired
    repaired_states: int = 0  # leaked state slots that audits reclaimed
    gen_throughput: float = 0.0  # tokens per second since the previous heartbeat
    last_gen_throughput: float = 0.0  # the same, from the last heartbeat with a value
    num_grammar_reqs: int = 0  # waiting requests whose grammar is being compiled
    grammar_tries: int = 0  # rollbacks of outputs that violated their schema
    grammar_taken_back: int = 0  # tokens rolled back for a grammar
    lora_slots_used: int = 0  # device slots in use
    lora_slots_total: int = 0  # 0: no adapters are served
    lora_adapters: int = 0  # registered adapters
    lora_copies: int = 0  # of these, in host memory
    decode_sum_seq_lens: int = 0  # over running requests
    retracted_input_tokens: int = 0  # prompt tokens of retracted requests
    retracted_output_tokens: int = 0  # output tokens of retracted requests
    prefill_tokens: int = 0  # prompt tokens computed
    evicted_tokens: int = 0  # from the prefix cache of the device
    new_token_ratio: float = 0.0  # share of its limit that a request is expected to generate
    forward_seconds: float = 0.0  # with at least one step in flight
    bubble_seconds: float = 0.0  # without a step although there was work
    idle_seconds: float = 0.0  # without work
    cpu_seconds: float = 0.0  # processor time of the process, all threads
    swa_used_tokens: int = 0  # in the fullest window KV group
    swa_total_tokens: int = 0  # 0: no such group
    mamba_used_states: int = 0  # slots of recurrent state
    mamba_total_states: int = 0  # 0: no recurrent layers
    grammars: int = 0  # grammars requested
    grammar_cache_hits: int = 0  # of these, already compiled
    grammars_refused: int = 0  # of these, rejected by the compiler
    grammar_timeouts: int = 0  # of these, timed out
    grammar_seconds: float = 0.0  # seconds spent compiling
    encoded_items: int = 0  # images, videos and audio clips encoded
    image_items: int = 0  # images of requests
    image_hits: int = 0  # of these, with cached vectors
    video_items: int = 0  # videos of requests
    video_hits: int = 0  # of these, with cached vectors
    audio_items: int = 0  # audio clips of requests
    audio_hits: int = 0  # of these, with cached vectors
    encoder_entries: int = 0  # items with cached vectors
    encoder_bytes: int = 0  # bytes of these vectors
    bucket_rows: int = 0  # token rows of steps that were padded to a bucket
    bucket_padded_rows: int = 0  # rows of these buckets; 0: steps are not padded
    recompilations: int = 0  # functions compiled while serving
    paused: bool = False  # nothing is computed until a Resume
    tiers: TierLoad | None = None  # None: no tiers
    disagg: DisaggLoad | None = None  # None: the server has no prefill or decode role

    @property
    def lora_utilization(self) -> float:
        """Share of the adapter slots in use."""
        return self.lora_slots_used / self.lora_slots_total if self.lora_slots_total else 0.0

    @property
    def bucket_waste(self) -> float:
        """Share of the computed rows that were padding."""
        return 1 - self.bucket_rows / self.bucket_padded_rows if self.bucket_padded_rows else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens per request and step that verifies draft tokens; 0 before the first."""
        steps = self.verified_drafts
        return 1 + self.accepted_draft_tokens / steps if steps else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of verified draft tokens that were right; 0 before the first."""
        proposed = self.proposed_draft_tokens
        return self.accepted_draft_tokens / proposed if proposed else 0.0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Heartbeat of a scheduler, sent at least twice a second between steps, even when idle."""

    load: SchedulerLoad


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """Heartbeat of a process that has nothing else to report."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A process has finished starting. `facts` describe the model and its limits."""

    facts: dict[str, str | int | float | bool | None]


class StartFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A process could not start; `message` is for the operator."""

    message: str


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """A starting process has loaded `done` of `total` bytes."""

    done: int
    total: int


class RankRendezvous(msgspec.Struct, frozen=True, kw_only=True, tag="meeting"):
    """Address where the first rank sends its steps to ranks on other machines; sent at the start.

    `tokens`: authentication token of each rank.
    """

    port: int
    tokens: dict[int, str]


FromScheduler = RankRendezvous | ControlReply | Heartbeat | Loading | Ready | StartFailed
