"""What requests spend outside the scheduler: client times less those of a simulation."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from sylvan.config.route import RoutingConfig
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import GenerateRequest
from sylvan.sim.cost import RequestCost
from sylvan.sim.fleet import Fleet
from sylvan.sim.measured import MeasuredRequest
from sylvan.sim.observed import Observed
from sylvan.sim.profile import Profile
from sylvan.sim.workload import SimulatedConversation, SimulatedTurn, Workload

WINDOW = 64  # how far a request may have been overtaken on its way to the scheduler
SEEDS = 3  # simulations that are compared with
LEAST_SHARE = 0.9  # of the measured requests that have to be in the recording


def matched(measured: MeasuredRequest, observed: Observed) -> list[tuple[int, GenerateRequest]]:
    """Places in the results with the recorded requests, in the order in which they were sent.

    The last requests that were recorded are those of the load test, in about the same order;
    requests of the same lengths may be taken for each other, which changes nothing.

    Raises:
        ConfigError: The results are those of another server.
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
    if len(found) < LEAST_SHARE * len(order):
        raise ConfigError(
            f"--results: {len(found)} of {len(order)} requests are in {observed.folder}; they "
            "have to come from the load test that was recorded, with answers of a fixed length"
        )
    return found


def _lengths(request: GenerateRequest) -> tuple[int, int]:
    return len(request.input_ids), request.sampling.max_new_tokens or 0


def workload(measured: MeasuredRequest, pairs: Sequence[tuple[int, GenerateRequest]]) -> Workload:
    """The measured requests with the recorded prompts, at the times when they were sent."""
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


def fit_outside(
    profile: Profile, measured: MeasuredRequest, observed: Observed, name: str
) -> Profile:
    """The profile with the times outside the scheduler.

    Args:
        profile: Without them.
        measured: The load test.
        observed: What the scheduler did meanwhile.
        name: Of the file of the load test.

    Raises:
        ConfigError: The results are those of another server.
    """
    pairs = matched(measured, observed)
    work, routing = workload(measured, pairs), RoutingConfig(policy="round_robin")
    inside = [Fleet(profile, routing, 1, seed=seed).run(work).ttft_s for seed in range(SEEDS)]
    clients = np.array([measured.ttfts[place] for place, _ in pairs])
    # of medians, since a queue that forms a little later makes single differences wild
    constant = max(0.0, float(np.median(clients) - np.median(inside)))
    cost = RequestCost(constant=constant)
    origin = msgspec.structs.replace(profile.origin, model=measured.model, results=name)
    return msgspec.structs.replace(profile, request=cost, origin=origin)
