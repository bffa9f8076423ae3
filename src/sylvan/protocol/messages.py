"""Messages between the API, scheduler and detokenizer processes: one tagged union a direction.

    API -> scheduler         ToScheduler
    scheduler -> detokenizer ToDetokenizer
    detokenizer -> API       TextBatch       (all that concerns a request comes this one way)
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
"""Label of weights that nobody has labelled."""
FinishType = Literal["stop", "length", "abort"]


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended.

    `matched` is the token id, stop string or regex that ended it. For an abort `status` is the
    HTTP status that tells the client best, or None if the client itself asked for the abort.
    """

    type: FinishType
    matched: int | str | None = None
    length: int | None = None
    message: str = ""
    status: int | None = None
    param: str | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probabilities of a run of P consecutive positions (natural log).

    The first prompt token has none: NaN in `logprobs`, and no alternatives (-1 in `top_ids`). Of a
    request for no tokens there is one row of `top_ids` and `chosen_logprobs`: what may come next.
    """

    token_ids: np.ndarray  # int32 (P,)
    logprobs: np.ndarray  # float32 (P,)
    top_ids: np.ndarray | None = None  # int32 (P, top)
    top_logprobs: np.ndarray | None = None  # float32 (P, top)
    chosen_logprobs: np.ndarray | None = None  # float32 (P, len(options.token_ids))


class DraftCounts(msgspec.Struct, frozen=True, gc=False):
    """What guesses brought a request.

    `histogram[n]` counts the steps that verified guesses and found the first n of them right.
    """

    proposed: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()

    def verified(self, proposed: int, accepted: int) -> DraftCounts:
        """With one more step that verified so many guesses."""
        counts = [*self.histogram, *[0] * (accepted + 1 - len(self.histogram))]
        counts[accepted] += 1
        return DraftCounts(self.proposed + proposed, self.accepted + accepted, tuple(counts))


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Counts of a request so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    loaded_tokens: int = 0  # of these, those that a store of KV brought
    host_tokens: int = 0  # of these, those that the tier in host memory brought
    retractions: int = 0
    drafts: DraftCounts | None = None  # None: no guess of it was verified
    media_tokens: dict[str, int] | None = None  # of the prompt, by kind of item; None: no items
    taken_back: int = 0  # tokens that were sampled, broke the schema, and are no part of the output


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds on the machine's monotonic clock at which a request passed a point; 0: not yet."""

    received: float = 0.0  # by the scheduler
    started: float = 0.0  # first slice launched
    first_token: float = 0.0
    finished: float = 0.0


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the steps since the last one brought for one request."""

    rid: str
    token_ids: tuple[int, ...] = ()
    usage: Usage = Usage()
    logprobs: TokenLogprobs | None = None  # of `token_ids`
    prompt_logprobs: TokenLogprobs | None = None  # once, with the first output
    embedding: np.ndarray | None = None  # float32
    finish: Finish | None = None
    timing: Timing | None = None  # with the finish


class TextOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A `TokenOutput` with its text. `token_ids` excludes those cut after a stop string."""

    rid: str
    text: str
    output: TokenOutput
    weight_version: str | None = None  # of the weights that made it, where that is new


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """The outputs that a step emits, computed with the weights labelled `weight_version`."""

    outputs: tuple[TokenOutput, ...]
    weight_version: str = DEFAULT_VERSION


class StartDetokenizing(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Detokenize the outputs of `rid` until its finish; sent before its first tokens.

    `output_ids` were detokenized before a restart: they restore the state and produce no text.
    `interval` is that of the request.
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
    """Sampling parameters that requests to come have in common; they replace those of `slot`."""

    slot: int
    sampling: SamplingParams


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Queue a request.

    With `params` its sampling parameters are those of that slot, but for `max_new_tokens` and
    `sampling_seed`, which are its own.
    """

    request: GenerateRequest | EmbedRequest
    params: int | None = None


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End a request in whatever state it is; unknown rids are ignored."""

    rid: str
    finish: Finish = Finish(type="abort", message="aborted by the client")


class StopFound(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The text of `rid` reached a stop string or regex after `num_tokens` output tokens.

    The scheduler ends the request there; later tokens enter neither usage nor cache. `matched` is
    None when a request that has stops ended by itself and none was found in its text: the
    scheduler keeps its memory until told one or the other.
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

    With an `owner` only the namespaces whose salt begins with it are shown.
    """

    max_nodes: int = 1000
    owner: str | None = None


class CacheRequest(msgspec.Struct, frozen=True, kw_only=True, tag="cache_request"):
    """Explain what the prompt of `rid` found in the cache, and why no more.

    With an `owner` the requests of others are not known.
    """

    rid: str
    owner: str | None = None


class CachePrompts(msgspec.Struct, frozen=True, kw_only=True, tag="cache_prompts"):
    """Hashes of the blocks of recent prompts, from which hit rates can be computed."""


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Stop scheduling. `abort` ends all requests, `retract` frees their memory first."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Continue scheduling."""


class SetWeightVersion(msgspec.Struct, frozen=True, kw_only=True, tag="weight_version"):
    """Label the weights in force."""

    version: str


class RegisterAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="register_adapter"):
    """An adapter that was loaded before may be asked for by its id; it is read when it is.

    `num_bytes` as `LoadAdapter` told.
    """

    id: str
    path: str
    num_bytes: int
    pinned: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Serve no new requests with an adapter; with `abort`, those with it end now."""

    id: str
    abort: bool = False


class AddCorpus(msgspec.Struct, frozen=True, kw_only=True, tag="add_corpus"):
    """Guess from these texts, too; those of the same name before are replaced."""

    id: str
    texts: tuple[tuple[int, ...], ...]


class RemoveCorpus(msgspec.Struct, frozen=True, kw_only=True, tag="remove_corpus"):
    """Guess no more from the texts of that name."""

    id: str


class ListCorpora(msgspec.Struct, frozen=True, kw_only=True, tag="list_corpora"):
    """Tell the names of texts that are guessed from, and how many tokens they have."""


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
    """Outcome of a `Control`: `message` says why it failed, `status` which HTTP status tells that.

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
    verified_drafts: int = 0  # slices with guesses that steps verified
    proposed_draft_tokens: int = 0  # the guesses in them
    accepted_draft_tokens: int = 0  # those that were right
    draft_seconds_won: float = 0.0  # what they saved, less what guessing and verifying took: about
    targets_set: int = 0  # finished requests that had a latency target
    targets_met: int = 0  # and met it: goodput
    repaired_pages: int = 0  # lost by a bug of ours, found and taken back
    repaired_locks: int = 0  # nodes of the prefix tree that such a bug kept from being evicted
    repaired_states: int = 0  # slots of recurrent state
    gen_throughput: float = 0.0  # tokens generated a second since the heartbeat before
    last_gen_throughput: float = 0.0  # the same, of the last heartbeat by which there were any
    num_grammar_reqs: int = 0  # of those that wait, whose grammar is being compiled
    grammar_tries: int = 0  # times that an output went back, since it broke its schema
    grammar_taken_back: int = 0  # tokens that were taken back then
    lora_slots_used: int = 0  # slots on the device with an adapter
    lora_slots_total: int = 0  # 0: no adapters are served
    lora_adapters: int = 0  # that may be asked for
    lora_copies: int = 0  # of these, in host memory
    decode_sum_seq_lens: int = 0  # of the requests that run
    retracted_input_tokens: int = 0  # prompts of requests that lost their memory, each time
    retracted_output_tokens: int = 0  # and their outputs by then
    prefill_tokens: int = 0  # of prompts, that steps computed
    evicted_tokens: int = 0  # from the prefix cache of the device
    new_token_ratio: float = 0.0  # share of its limit that a request is expected to generate
    forward_seconds: float = 0.0  # in which a step was under way
    bubble_seconds: float = 0.0  # in which none was although there was work
    idle_seconds: float = 0.0  # without work
    cpu_seconds: float = 0.0  # processor time of the process, all threads
    swa_used_tokens: int = 0  # of KV groups with a window, the fullest
    swa_total_tokens: int = 0  # 0: there are none
    mamba_used_states: int = 0  # slots of recurrent state
    mamba_total_states: int = 0  # 0: there are none
    grammars: int = 0  # grammars that were asked for
    grammar_cache_hits: int = 0  # of these, that were compiled already
    grammars_refused: int = 0  # of these, that could not be compiled
    grammar_timeouts: int = 0  # of these, in time
    grammar_seconds: float = 0.0  # that compiling took
    encoded_items: int = 0  # images, videos and sounds that were encoded
    image_items: int = 0  # images of requests
    image_hits: int = 0  # of these, whose vectors were there already
    video_items: int = 0  # videos of requests
    video_hits: int = 0  # of these, whose vectors were there already
    audio_items: int = 0  # sounds of requests
    audio_hits: int = 0  # of these, whose vectors were there already
    encoder_entries: int = 0  # items whose vectors are kept
    encoder_bytes: int = 0  # of these vectors
    paused: bool = False  # nothing is computed before a Resume
    tiers: TierLoad | None = None  # None: there are none
    disagg: DisaggLoad | None = None  # None: the server has no role

    @property
    def lora_utilization(self) -> float:
        """Share of the slots that are used."""
        return self.lora_slots_used / self.lora_slots_total if self.lora_slots_total else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens that a request gets of a step that verifies guesses of it; 0: none did yet."""
        steps = self.verified_drafts
        return 1 + self.accepted_draft_tokens / steps if steps else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the verified guesses that were right; 0: there were none yet."""
        proposed = self.proposed_draft_tokens
        return self.accepted_draft_tokens / proposed if proposed else 0.0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Sign of life of a scheduler; sent at least twice a second between steps, also when idle."""

    load: SchedulerLoad


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """Sign of life of a process that has nothing else to tell."""


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


FromScheduler = ControlReply | Heartbeat | Loading | Ready | StartFailed
