"""Where the prompt is cached, unless waiting there would cost more than computing it elsewhere."""

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
"""Tokens of prefill whose delay equals that of one more running request: what a worker is charged
for each request that it has."""
CACHE_THRESHOLD, ABS_THRESHOLD, REL_THRESHOLD = 0.3, 64, 1.5
"""SGLang's defaults, for thresholds that are not given."""
LEARNING_RATE = 0.02
MANY = 32
"""Workers from which on it pays to look at all of them at once."""
TIES = 8
"""Of workers of equal cost so many are looked at for the smallest tree."""


class CacheAware(RoutingPolicy):
    """Sends a request where it costs least; keeps an approximate tree of what each worker holds.

    The cost of a worker is, in tokens: those of prompts that it has yet to compute, those of this
    prompt that it would have to, and `RUNNING_TOKENS` for each request that it runs. Waiting delays
    one request, computing what another worker holds delays whoever comes next as well: tokens that
    wait count the less, down to half, the more workers are busy. Otherwise a prompt that is being
    computed drives those that share its prefix to workers that compute it again. Since every choice
    is of least cost, the costs of two workers differ by less than one prompt and one request,
    whatever the trace; a cached prefix attracts what it saves and no more.

    With any of the three thresholds given, SGLang's rule decides instead: the least loaded worker
    if loads differ too much; else the one that holds most of the prompt, if that is enough; else
    the one with the smallest tree.

    Of workers whose cache events are followed, what they hold of a prompt is not estimated but
    known, where the token ids of the prompt are.

    Args:
        config: Thresholds, and the bound on the tree.
        rng: Breaks ties.
        blocks: What workers say that they hold; None: they are not followed.

    Attributes:
        tree: What each worker was given, by its id.
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
        """The columns of many workers that are the same as at the last choice."""
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
    """A prompt, and what workers hold of it.

    `matched` counts bytes, those of the salt included, for each worker that holds any.
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
        """Tokens that are to be computed by who holds so many bytes; the last one always is."""
        missing = self._missing.get(matched_bytes)
        if missing is None:
            left = self._num_bytes - max(0, matched_bytes - PAGE)
            missing = max(1, int(left / self._bytes_per_token)) if self._num_bytes else 0
            self._missing[matched_bytes] = missing
        return missing

    def share_of(self, worker: Worker) -> float:
        """The share of the prompt that a worker holds."""
        return max(0, self.matched.get(worker.id, 0) - PAGE) / max(1, self._num_bytes)

    def place(self, worker: Worker, branch: str = "") -> Placement:
        """Choose a worker."""
        held = self.matched.get(worker.id, 0)
        return Placement(
            worker, self.missing_of(held), branch or ("hit" if held > PAGE else "miss")
        )


def _cheapest(workers: Sequence[Worker], prompt: _Prompt) -> Sequence[int]:
    """Places of the workers of least cost, in order."""
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
    """The same as `_cheapest`, to the last digit, of all workers at once."""
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
    """Empty if they are not known, or none."""
    try:
        return array("i", token_ids or ()).tobytes()
    except (TypeError, OverflowError):  # the worker will say what is wrong with them
        return b""


def _corrected(
    held: Mapping[str, int], known: Mapping[str, int], request: RoutingRequest
) -> Mapping[str, int]:
    """Bytes that each worker holds, with what is known instead of what is estimated.

    Args:
        held: Bytes, those of the salt included, by worker.
        known: Tokens, of workers of which it is known.
        request: Whose prompt it is; its token ids are given.
    """
    bytes_per_token = len(request.prompt) / max(1, len(request.token_ids or ()))
    exact = {name: PAGE + math.ceil(count * bytes_per_token) for name, count in known.items()}
    return {**held, **exact}


def _salt(namespace: str) -> bytes:
    """One page that keeps namespaces apart."""
    return blake2b(namespace.encode(), digest_size=PAGE).digest()


def create(parts: PolicyParts) -> CacheAware:
    return CacheAware(parts.config, parts.rng, parts.blocks)
