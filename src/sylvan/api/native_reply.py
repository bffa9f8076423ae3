"""Answers of `/generate`, one sample at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sylvan.api.logprobs import TokenText, chosen_entries, token_entries, top_entries
from sylvan.protocol.messages import DraftCounts, Finish, Timing, TokenLogprobs, Usage
from sylvan.utils.clock import monotonic


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyOptions:
    """Options of the answer.

    Attributes:
        logprobs: Log probabilities were requested.
        top: Alternatives per position were requested.
        wanted_ids: Token IDs whose log probabilities were requested.
        text_of: Decodes a token, if log probabilities include text.
        prompt_ids: Token IDs of the prompt, if they are returned.
        index: Index in the batch, for streams.
        weight_version: Version label of the weights, for answers that end before any output.
    """

    logprobs: bool = False
    top: bool = False
    wanted_ids: Sequence[int] = ()
    text_of: TokenText | None = None
    prompt_ids: Sequence[int] | None = None
    index: int | None = None
    weight_version: str = "default"


@dataclass(slots=True)
class ReplyState:
    """The state of one sample's answer; `cumulative` keeps all output, otherwise only new output.

    `weight_versions` are the labels of the weights that generated it, in order.
    """

    options: ReplyOptions
    cumulative: bool = True
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    reasoning_tokens: int = 0
    keys: dict[str, list[Any]] = field(default_factory=dict)
    weight_versions: Sequence[str] = ()

    def add(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None,
        prompt_logprobs: TokenLogprobs | None,
    ) -> None:
        """Add a delta."""
        if not self.cumulative:
            # earlier replies share these lists, so copy them
            self.text, self.output_ids = "", []
            self.keys = {k: [] if k.startswith("output_") else v for k, v in self.keys.items()}
        self.text += text
        self.output_ids.extend(token_ids)
        if prompt_logprobs is not None:
            self._add_logprobs("input", prompt_logprobs)
        if logprobs is not None:
            self.num_logprobs += len(logprobs.token_ids)
            self._add_logprobs("output", logprobs)

    def _add_logprobs(self, side: str, part: TokenLogprobs) -> None:
        options = self.options
        entries = token_entries(part, options.text_of)
        self.keys.setdefault(f"{side}_token_logprobs", []).extend(entries)
        if options.top:
            tops = top_entries(part, options.text_of)
            self.keys.setdefault(f"{side}_top_logprobs", []).extend(tops)
        if options.wanted_ids:
            chosen = chosen_entries(part, options.wanted_ids, options.text_of)
            self.keys.setdefault(f"{side}_token_ids_logprobs", []).extend(chosen)

    def reply(
        self, rid: str, usage: Usage, finish: Finish | None, timing: dict[str, float]
    ) -> dict[str, Any]:
        """Return the answer object."""
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": None if finish is None else finish_reason(finish),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            **{f"{kind}_tokens": n for kind, n in (usage.media_tokens or {}).items()},
            "reasoning_tokens": self.reasoning_tokens,
            "weight_version": (*self.weight_versions, self.options.weight_version)[
                max(0, len(self.weight_versions) - 1)
            ],
            "num_retractions": usage.retractions,
            **({"taken_back_tokens": usage.taken_back} if usage.taken_back else {}),
            **draft_keys(usage.drafts),
            **timing,
        }
        if usage.host_tokens or usage.loaded_tokens:
            meta["cached_tokens_details"] = {
                "device": usage.cached_tokens - usage.host_tokens - usage.loaded_tokens,
                "host": usage.host_tokens,
                "storage": usage.loaded_tokens,
            }
        if len(self.weight_versions) > 1:
            meta["weight_versions"] = list(self.weight_versions)
        if self.options.logprobs:
            meta["input_token_logprobs"] = self.keys.get("input_token_logprobs", [])
            meta["output_token_logprobs"] = self.keys.get("output_token_logprobs", [])
            meta.update(self.keys)
            meta["output_token_logprobs_length"] = self.num_logprobs
        reply: dict[str, Any] = {
            "text": self.text,
            "output_ids": self.output_ids,
            "meta_info": meta,
        }
        if self.options.prompt_ids is not None:
            reply["prompt_token_ids"] = self.options.prompt_ids
        if self.options.index is not None:
            reply["index"] = self.options.index
        return reply


def finish_reason(finish: Finish) -> dict[str, Any]:
    """Return `meta_info.finish_reason`."""
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": finish.length}
    reason: dict[str, Any] = {"type": "abort", "message": finish.message}
    if finish.status is not None:
        reason["status_code"] = finish.status
        reason["err_type"] = "BadRequestError" if finish.status < 500 else "ServiceUnavailable"
    return reason


def draft_keys(drafts: DraftCounts | None) -> dict[str, Any]:
    """Return the speculative decoding counters; empty without speculation.

    `spec_accept_length` counts tokens per verification step, including the token sampled after the
    drafts; `spec_correct_drafts_histogram[n]` counts steps that accepted exactly n drafts.
    """
    if drafts is None:
        return {}
    steps = sum(drafts.histogram)
    return {
        "spec_verify_ct": steps,
        "spec_accept_length": 1 + drafts.accepted / steps,
        "spec_accept_rate": drafts.accepted / drafts.proposed,
        "spec_num_correct_drafts": drafts.accepted,
        "spec_num_proposed_drafts": drafts.proposed,
        "spec_correct_drafts_histogram": list(drafts.histogram),
    }


def timing_keys(timing: Timing | None, e2e_s: float, sent_at: float, tokens: int) -> dict[str, Any]:
    """Return the times of a finished sample in seconds; names with `ts` or `time` are Unix times.

    `sent_at`: current Unix time.
    """
    keys: dict[str, Any] = {"e2e_latency": e2e_s, "response_sent_to_client_ts": sent_at}
    if timing is None:
        return keys
    offset_s = sent_at - monotonic()
    for name, at in (
        ("request_received_ts", monotonic() - e2e_s),
        ("api_server_dispatch_finish_ts", timing.received),
        ("forward_entry_time", timing.started),
        ("prefill_finished_time", timing.first_token),
        ("request_finished_ts", timing.finished),
    ):
        if at:
            keys[name] = at + offset_s
    if timing.received and timing.started:
        keys["queue_time"] = timing.started - timing.received
    if timing.received and timing.first_token:
        keys["first_token_latency"] = timing.first_token - timing.received
        decode_s = timing.finished - timing.first_token
        if tokens > 1 and decode_s > 0:
            keys["decode_throughput"] = (tokens - 1) / decode_s
    return keys
