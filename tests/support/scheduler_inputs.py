"""Settings and requests of a scheduler, as hypothesis strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from sylvan.runtime.cache import eviction
from sylvan.runtime.sched import policies
from sylvan.utils import plugins

STARTS = [[(7 * i + 13 * k) % 40 for i in range(80)] for k in range(3)]
"""Prompts begin with one of these; the first is a system prompt that may be declared public."""

POLICIES = plugins.options(policies)
EVICTIONS = plugins.options(eviction)


def setups(states: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw settings of a server. `room` is its memory in tokens, `lag` the delay of the detokenizer
    in steps.
    """
    return st.fixed_dictionaries(
        {
            "policy": st.sampled_from(POLICIES),
            "eviction": st.sampled_from(EVICTIONS),
            "page_size": st.sampled_from([1, 2, 4, 16, 64]),
            "room": st.sampled_from([200, 96, 48, 600, 24]),
            "inflight": st.sampled_from([1, 2, 3]),
            "chunk_tokens": st.sampled_from([64, 16, 3, 1]),
            "max_batch_tokens": st.sampled_from([64, 16, 5]),
            "max_running_reqs": st.sampled_from([8, 4, 1]),
            "max_waiting_reqs": st.sampled_from([100, 100, 3]),
            "prefix": st.sampled_from([True, True, True, False]),
            "share_in_batch": st.booleans(),
            "age_limit_s": st.sampled_from([10.0, 0.2, 0.0]),
            "queue_timeout_s": st.sampled_from([None, None, None, 0.5]),
            "conservativeness": st.sampled_from([0.0, 1.0]),
            "preemption_threshold": st.sampled_from([10, 1, None]),
            "whole_prompts": st.booleans(),
            "pool_all": st.booleans(),
            "lag": st.integers(0, 3),
            "public": st.booleans(),
            "states": states,
        }
    )


@dataclass(frozen=True)
class ClientRequest:
    """A client's request, before it is cut to what fits."""

    start: int
    common: int
    own: tuple[int, ...]
    new: int
    replayed: int
    tenant: str
    salt: str
    embed: bool
    interval: int | None  # tokens to emit together
    text_ends: int  # a stop is found after so many outputs; 0: nowhere
    limits: dict[str, Any]
    targets: dict[str, Any]
    sampling: dict[str, Any]


client_requests = st.builds(
    ClientRequest,
    start=st.sampled_from([0, 0, 1, 2]),
    common=st.sampled_from([40, 70, 20, 33, 5, 0]),
    own=st.lists(st.integers(0, 39), min_size=1, max_size=6).map(tuple),
    new=st.sampled_from([8, 24, 1, 3, 0, 60]),
    replayed=st.sampled_from([0, 0, 0, 0, 3]),
    tenant=st.sampled_from(["", "", "", "a", "b"]),
    salt=st.sampled_from(["", "", "", "", "own"]),
    embed=st.sampled_from([False] * 6 + [True]),
    interval=st.sampled_from([1, None, 3, 1]),
    text_ends=st.sampled_from([0, 0, 1, 5, 9]),
    limits=st.fixed_dictionaries(
        {
            "priority": st.sampled_from([0, 0, 0, 1, 20]),
            "deadline_s": st.sampled_from([None] * 8 + [0.05, 0.5]),
        }
    ),
    targets=st.fixed_dictionaries(
        {
            "ttft_ms": st.sampled_from([None, None, 50.0]),
            "tpot_ms": st.sampled_from([None, None, 1.0, 20.0]),
        }
    ),
    sampling=st.fixed_dictionaries(
        {
            "sampling_seed": st.integers(0, 2),
            "min_new_tokens": st.sampled_from([0, 0, 2, 9]),
            "stop_token_ids": st.sampled_from([(), (), (1, 2, 3), tuple(range(0, 50, 3))]),
            "ignore_eos": st.sampled_from([False, False, True]),
            "stop": st.sampled_from([(), ("x",)]),
        }
    ),
)
