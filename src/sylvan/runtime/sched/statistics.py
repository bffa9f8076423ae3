"""Counters of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from sylvan.protocol.messages import DraftCounts, SchedulerLoad
from sylvan.runtime.cache.audit import Repairs
from sylvan.runtime.cache.by_rank import KVMemory, capacity_tokens
from sylvan.runtime.cache.windows import fullest
from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.outputs import met_targets
from sylvan.runtime.sched.phases import RequestTable
from sylvan.runtime.sched.planner import Planner
from sylvan.runtime.sched.step_times import StepTimes


@dataclass(slots=True)
class Statistics:
    """Totals since the start.

    Attributes:
        steps: Steps with at least one slice.
        computed: Computed tokens.
        cached: Prompt tokens of started requests that came from the prefix cache.
        generated: Tokens sampled, or forced without sampling.
        verified: Slices with draft tokens.
        proposed: Draft tokens verified.
        accepted: Draft tokens that were right.
        targets: Ended requests that had latency targets.
        met: Ended requests that met their targets.
        repairs: Memory that audits reclaimed.
    """

    steps: int = 0
    computed: int = 0
    cached: int = 0
    generated: int = 0
    verified: int = 0
    proposed: int = 0
    accepted: int = 0
    targets: int = 0
    met: int = 0
    repairs: Repairs = field(default_factory=Repairs)

    def skip(self, steps: int, requests: int) -> None:
        """Count `steps` decode steps that were skipped at once."""
        self.steps += steps
        self.computed += steps * requests
        self.generated += steps * requests

    def on_finish(self, req: Req, now_s: float) -> None:
        """`req` has ended."""
        met = met_targets(req, now_s)
        self.targets += met is not None
        self.met += bool(met)

    def on_verified(self, req: Req, proposed: int, accepted: int) -> None:
        """A step verified draft tokens of `req`."""
        req.drafts = (req.drafts or DraftCounts()).verified(proposed, accepted)
        self.verified += 1
        self.proposed += proposed
        self.accepted += accepted

    def load(
        self, requests: RequestTable, cache: KVMemory, planner: Planner, times: StepTimes
    ) -> SchedulerLoad:
        """Counts for health checks, balancing and metrics."""
        windows, states = fullest(cache.windows), cache.states
        return SchedulerLoad(
            num_running_reqs=len(requests.running),
            num_waiting_reqs=len(requests.waiting) + len(requests.loading),
            num_used_tokens=cache.used_tokens,
            num_cached_tokens=cache.cached_tokens,
            max_total_num_tokens=capacity_tokens(cache),
            steps=self.steps,
            computed_tokens=self.computed,
            cached_prompt_tokens=self.cached,
            generated_tokens=self.generated,
            retractions=planner.retractions,
            verified_drafts=self.verified,
            proposed_draft_tokens=self.proposed,
            accepted_draft_tokens=self.accepted,
            targets_set=self.targets,
            targets_met=self.met,
            repaired_pages=self.repairs.pages,
            repaired_locks=self.repairs.locks,
            repaired_states=self.repairs.states,
            decode_sum_seq_lens=sum(req.tokens.length for req in requests.running),
            retracted_input_tokens=planner.retracted_inputs,
            retracted_output_tokens=planner.retracted_outputs,
            prefill_tokens=times.prompt_tokens,
            evicted_tokens=cache.evicted_pages * cache.page_size,
            new_token_ratio=planner.admission.ratio,
            forward_seconds=times.forward_s,
            bubble_seconds=times.bubble_s,
            idle_seconds=times.idle_s,
            swa_used_tokens=windows[0],
            swa_total_tokens=windows[1],
            mamba_used_states=states.num_slots - states.free_slots if states else 0,
            mamba_total_states=states.num_slots if states else 0,
        )
