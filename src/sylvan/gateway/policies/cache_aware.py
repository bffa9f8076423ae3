"""Places requests where their prefix is cached, unless queueing there would cost more."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from random import Random

import numpy as np

from sylvan.config.route import RoutingConfig
from sylvan.gateway.policies.api import (
    BYTES_PER_TOKEN,
    Placement,
    PlacementOutcome,
    PolicyParts,
    RoutingPolicy,
    RoutingRequest,
)
from sylvan.gateway.prefixes.blocks import BlockIndex
from sylvan.gateway.prefixes.tree import PAGE, PrefixTree
from sylvan.gateway.workers.columns import LoadColumns
from sylvan.gateway.workers.worker import Worker

RUNNING_TOKENS = 64
"""Cost of one running request: the tokens whose prefill causes the same delay. Each worker's cost
includes this for every request that it runs."""
CACHE_THRESHOLD, ABS_THRESHOLD, REL_THRESHOLD = 0.3, 64, 1.5
"""SGLang's defaults for the thresholds."""
LEARNING_RATE = 0.02
MANY = 32
"""Number of workers from which on costs are computed as arrays."""
TIES = 8
"""Most workers of equal cost that are compared by tree size."""


class CacheAware(RoutingPolicy):
    """Sends a request to the worker of least cost; approximates each worker's cache with a tree.

    The cost of a worker, in tokens, is: prompt tokens it still has to compute, tokens of this
    prompt that are not cached there, and `RUNNING_TOKENS` per running request. Queueing delays one
    request; recomputing what another worker has cached also delays the requests behind it. So the
    more workers are busy, the less queued tokens count, down to half. Without this, requests that
    share the prefix of a running prefill would move to workers that compute it again. Every choice
    is of least cost, so the costs of two workers differ by less than one prompt and one request on
    any trace; a cached prefix attracts no more than it saves.

    If any of the three thresholds is set, SGLang's rule decides instead: the least loaded worker
    if loads differ too much; else the worker with the longest cached prefix, if it is long enough;
    else the worker with the smallest tree.

    For workers whose cache events are followed, the cached prefix is exact instead of estimated,
    if the prompt's token IDs are known.

    Args:
        config: Thresholds, and the limit of the tree.
        rng: Breaks ties.
        blocks: Exact index of cached blocks; None: events are not followed.

    Attributes:
        tree: Prompts sent to each worker, by worker ID.
    """

    def __init__(
        self, config: RoutingConfig, rng: Random, blocks: BlockIndex | None = None
    ) -> None:
        given = (
            config.cache_threshold,
            config.balance_abs_threshold,
            config.balance_rel_threshold,
        )
        usual = (CACHE_THRESHOLD, ABS_THRESHOLD, REL_THRESHOLD)
        share, gap, ratio = (d if v is None else v for v, d in zip(given, usual, strict=True))
        self._thresholds = (float(share), float(gap), float(ratio))
        self._choose = self._by_cost if given == (None, None, None) else self._by_thresholds
        self._bytes_per_token = float(BYTES_PER_TOKEN)
        self._seen: Sequence[Worker] = ()
        self._columns: LoadColumns | None = None
        self._rng = rng
        self._blocks = blocks
        self.tree = PrefixTree(config.max_tree_bytes)

    def select(self, workers: Sequence[Worker], request: RoutingRequest) -> Placement:
        found = self.tree.find(_salt(request.namespace) + request.prompt)
        held, ids = self.tree.matched(found, beyond=PAGE), b""
        if self._blocks is not None and not request.namespace.strip("/"):
            ids = _as_int32(request.token_ids)
            held = _corrected(held, self._blocks.matched(ids), request) if ids else held
        prompt = _Prompt(request, held, self._bytes_per_token)
        placement = self._choose(workers, prompt)
        self.tree.insert(found, placement.worker.id)
        if self._blocks is None or not ids:
            return placement
        promise = self._blocks.promise(placement.worker.id, ids)
        return replace(placement, promise=promise)

    def completed(
        self, placement: Placement, request: RoutingRequest, outcome: PlacementOutcome
    ) -> None:
        if placement.promise is not None:
            placement.promise.close()
        if outcome.prompt_tokens and request.token_ids is None and request.prompt:
            seen = len(request.prompt) / outcome.prompt_tokens
            self._bytes_per_token += LEARNING_RATE * (seen - self._bytes_per_token)
        capacity = placement.worker.found.capacity_tokens
        if capacity:
            limit = int(capacity * self._bytes_per_token)
            self.tree.set_limit(placement.worker.id, limit)

    def learn(self, placement: Placement, request: RoutingRequest, at_s: float) -> None:
        found = self.tree.find(_salt(request.namespace) + request.prompt)
        self.tree.insert(found, placement.worker.id)

    def forget(self, worker: Worker) -> None:
        self.tree.drop(worker.id)

    def _by_cost(self, workers: Sequence[Worker], prompt: _Prompt) -> Placement:
        columns = self._columns_of(workers)
        rows = _cheapest(workers, prompt) if columns is None else _cheapest_of(columns, prompt)
        if len(rows) > TIES:
            rows = self._rng.sample(rows, TIES)
        ties = [workers[row] for row in rows]
        chosen = min(ties, key=lambda worker: self.tree.held_bytes(worker.id))
        return prompt.place(chosen)

    def _columns_of(self, workers: Sequence[Worker]) -> LoadColumns | None:
        """Return the columns of many workers that have not changed since the last choice."""
        if self._columns is not None and self._columns.workers is workers:
            return self._columns
        if len(workers) < MANY or self._seen is not workers:
            self._seen = workers
            return None
        if self._columns is not None:
            self._columns.close()
        self._columns = LoadColumns(workers)
        return self._columns

    def _by_thresholds(self, workers: Sequence[Worker], prompt: _Prompt) -> Placement:
        share, gap, ratio = self._thresholds
        matched = prompt.matched
        loads = [worker.weighted_load for worker in workers]
        if max(loads) - min(loads) > gap and max(loads) > ratio * min(loads):
            return prompt.place(workers[loads.index(min(loads))], "balanced")
        best = max(workers, key=lambda w: (matched.get(w.id, 0), -w.weighted_load))
        if prompt.share_of(best) > share:
            return prompt.place(best)
        return prompt.place(min(workers, key=lambda w: self.tree.held_bytes(w.id)), "miss")


class _Prompt:
    """A prompt, and how much of it each worker has cached.

    `matched` counts bytes, including the salt, for each worker with a cached prefix.
    """

    def __init__(
        self, request: RoutingRequest, matched: Mapping[str, int], bytes_per_token: float
    ) -> None:
        self.matched = matched
        self._num_bytes = len(request.prompt)
        if request.token_ids is not None:
            bytes_per_token = self._num_bytes / max(1, len(request.token_ids))
        self._bytes_per_token = bytes_per_token or BYTES_PER_TOKEN
        self._missing: dict[int, int] = {}

    def missing_of(self, matched_bytes: int) -> int:
        """Return the tokens to compute for that many cached bytes; the last token always counts."""
        missing = self._missing.get(matched_bytes)
        if missing is None:
            left = self._num_bytes - max(0, matched_bytes - PAGE)
            missing = max(1, int(left / self._bytes_per_token)) if self._num_bytes else 0
            self._missing[matched_bytes] = missing
        return missing

    def share_of(self, worker: Worker) -> float:
        """Return the share of the prompt that a worker has cached."""
        return max(0, self.matched.get(worker.id, 0) - PAGE) / max(1, self._num_bytes)

    def place(self, worker: Worker, branch: str = "") -> Placement:
        """Select a worker."""
        held = self.matched.get(worker.id, 0)
        return Placement(
            worker, self.missing_of(held), branch or ("hit" if held > PAGE else "miss")
        )


def _cheapest(workers: Sequence[Worker], prompt: _Prompt) -> Sequence[int]:
    """Return the indices of the workers of least cost, ascending."""
    least = math.inf
    ties: list[int] = []
    matched, of_nothing = prompt.matched, prompt.missing_of(0)
    loads = [w.num_running + w.peer_running + w.foreign_load for w in workers]
    patience = 1.0 + (len(loads) - loads.count(0)) / len(loads)
    for row, (worker, load) in enumerate(zip(workers, loads, strict=True)):
        held = matched.get(worker.id)
        missing = of_nothing if held is None else prompt.missing_of(held)
        waiting = (worker.queued_tokens + worker.peer_tokens) / patience
        cost = (waiting + missing + RUNNING_TOKENS * load) * worker.cost
        if cost < least:
            least, ties = cost, [row]
        elif cost == least:
            ties.append(row)
    return ties


def _cheapest_of(columns: LoadColumns, prompt: _Prompt) -> Sequence[int]:
    """Compute `_cheapest` for all workers at once, with bit-identical results."""
    loads, rows = columns.loads, columns.rows
    patience = 1.0 + int(np.count_nonzero(loads)) / len(loads)
    waiting = columns.tokens / patience
    costs = waiting + prompt.missing_of(0)
    for name, held in prompt.matched.items():
        row = rows.get(name)
        if row is not None:
            costs[row] = waiting[row] + prompt.missing_of(held)
    costs += RUNNING_TOKENS * loads
    costs *= columns.costs
    found: list[int] = np.flatnonzero(costs == costs.min()).tolist()
    return found


def _as_int32(token_ids: Sequence[int] | None) -> bytes:
    """Return the IDs as an array; empty if unknown."""
    try:
        return array("i", token_ids or ()).tobytes()
    except (TypeError, OverflowError):  # the worker will report the error
        return b""


def _corrected(
    held: Mapping[str, int], known: Mapping[str, int], request: RoutingRequest
) -> Mapping[str, int]:
    """Return each worker's cached bytes, with exact counts replacing estimates.

    Args:
        held: Estimated bytes, including the salt, by worker.
        known: Exact tokens, by worker.
        request: The request; its token IDs are known.
    """
    bytes_per_token = len(request.prompt) / max(1, len(request.token_ids or ()))
    exact = {name: PAGE + math.ceil(count * bytes_per_token) for name, count in known.items()}
    return {**held, **exact}


def _salt(namespace: str) -> bytes:
    """Return one page that separates namespaces."""
    return blake2b(namespace.encode(), digest_size=PAGE).digest()


def create(parts: PolicyParts) -> CacheAware:
    return CacheAware(parts.config, parts.rng, parts.blocks)
