"""Fits the time that requests spend outside the scheduler.

Its median is that of the clients' times minus that of simulated times. Its spread is measured: the
recording has the times when a request reached the scheduler and when its first token was there, the
results when the client sent it and had the token. The two clocks differ by a constant, so the way
back is known up to a constant. The way there is not, since requests wait for the end of a step
before the scheduler sees them, which the simulation contains already.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from sylvan.config.route import RoutingConfig
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import GenerateRequest
from sylvan.sim.cost import RequestCost
from sylvan.sim.fit import MIN_STEPS, QUANTILES, SCATTER_BETWEEN
from sylvan.sim.fleet import Fleet
from sylvan.sim.measured import MeasuredRequest
from sylvan.sim.observed import Observed
from sylvan.sim.profile import Profile
from sylvan.sim.workload import SimulatedConversation, SimulatedTurn, Workload

WINDOW = 64  # how far a request may be overtaken on its way to the scheduler
SEEDS = 3  # number of simulations to compare with
MIN_SHARE = 0.9  # share of the measured requests that must be in the recording


def matched(measured: MeasuredRequest, observed: Observed) -> list[tuple[int, GenerateRequest]]:
    """Return the indices of the recorded requests in the results, in sending order.

    The last recorded requests are those of the load test, in about the same order;
    requests of equal lengths may be swapped, which changes nothing.

    Raises:
        ConfigError: The results are of another server.
    """
    order = measured.order
    coming = [request for _, request in observed.requests]
    left = coming[max(0, len(coming) - len(order)) :]
    found: list[tuple[int, GenerateRequest]] = []
    for place in order:
        wanted = (measured.input_lens[place], measured.output_lens[place])
        for index, request in enumerate(left[:WINDOW]):
            if _lengths(request) == wanted:
                found.append((place, left.pop(index)))
                break
    if len(found) < MIN_SHARE * len(order):
        raise ConfigError(
            f"--results: {len(found)} of {len(order)} requests are in {observed.folder}; they "
            "have to come from the load test that was recorded, with answers of a fixed length"
        )
    return found


def _lengths(request: GenerateRequest) -> tuple[int, int]:
    return len(request.input_ids), request.sampling.max_new_tokens or 0


def workload(measured: MeasuredRequest, pairs: Sequence[tuple[int, GenerateRequest]]) -> Workload:
    """Return the measured requests with the recorded prompts, at their sending times."""
    first_s = measured.sent[pairs[0][0]] if pairs else 0.0
    return Workload(
        [
            SimulatedConversation(
                [SimulatedTurn([request.input_ids], max(1, request.sampling.max_new_tokens or 0))],
                measured.sent[place] - first_s,
            )
            for place, request in pairs
        ]
    )


def fit_request_cost(
    profile: Profile, measured: MeasuredRequest, observed: Observed, name: str
) -> Profile:
    """Return the profile with the time outside the scheduler.

    Args:
        profile: Profile without it.
        measured: Results of the load test.
        observed: The recording made meanwhile.
        name: File name of the results.

    Raises:
        ConfigError: The results are of another server.
    """
    pairs = matched(measured, observed)
    work, routing = workload(measured, pairs), RoutingConfig(policy="round_robin")
    inside = [Fleet(profile, routing, 1, seed=seed).run(work).ttft_s for seed in range(SEEDS)]
    clients = np.array([measured.ttfts[place] for place, _ in pairs])
    # use medians: a slightly later queue makes single differences extreme
    constant = max(0.0, float(np.median(clients) - np.median(inside)))
    cost = RequestCost(constant=constant, spread=_spread(measured, pairs, observed))
    origin = msgspec.structs.replace(profile.origin, model=measured.model, results=name)
    return msgspec.structs.replace(profile, request=cost, origin=origin)


def _spread(
    measured: MeasuredRequest, pairs: Sequence[tuple[int, GenerateRequest]], observed: Observed
) -> tuple[float, ...]:
    """Return quantiles of the way of first tokens to clients, relative to their median."""
    ways = [
        measured.sent[place] + measured.ttfts[place] - observed.first_s[request.rid]
        for place, request in pairs
        if request.rid in observed.first_s
    ]
    if len(ways) < MIN_STEPS:
        return ()
    found = np.percentile(ways, np.linspace(*SCATTER_BETWEEN, QUANTILES))
    return tuple((found - np.median(ways)).tolist())
