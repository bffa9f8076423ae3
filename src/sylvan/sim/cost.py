"""Step durations: a fitted cost model with the measured noise."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from sylvan.sim.features import KNOTS, SEGMENTS, PlanShape

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Shift = Annotated[float, msgspec.Meta(ge=-3600, le=3600)]
DRAWS = 4096  # random numbers drawn at a time


class StepCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of the model's part of a step; see `features`.

    Attributes:
        constant: Fixed cost of a step.
        rows: Cost per row in each segment between knots.
        sample: Cost per sampled row.
        context: Cost per token that a decoding row attends to.
        pair: Cost per query-key pair of prompts.
        decode_scatter: Evenly spaced quantiles of measured over modelled time, for steps in which
            each request computes one token. Empty: no noise.
        prompt_scatter: The same for other steps.
    """

    constant: Seconds
    rows: Annotated[tuple[Seconds, ...], msgspec.Meta(min_length=SEGMENTS, max_length=SEGMENTS)]
    sample: Seconds = 0.0
    context: Seconds = 0.0
    pair: Seconds = 0.0
    decode_scatter: Annotated[tuple[Ratio, ...], msgspec.Meta(max_length=1025)] = ()
    prompt_scatter: Annotated[tuple[Ratio, ...], msgspec.Meta(max_length=1025)] = ()


class HostCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds between the model's parts of two steps: scheduler, main loop, and sending.

    Attributes:
        constant: Fixed cost of a step.
        slice: Cost per request in the step.
        start: Cost per request that joins.
        scatter: Noise, as in `StepCost`.
    """

    constant: Seconds
    slice: Seconds = 0.0
    start: Seconds = 0.0
    scatter: Annotated[tuple[Ratio, ...], msgspec.Meta(max_length=1025)] = ()


class RequestCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that a request spends outside the scheduler: HTTP, tokenisation, channels, client.

    Attributes:
        constant: Median cost of a request.
        spread: Evenly spaced quantiles of the seconds by which answers reach their clients later
            than the median. Empty: no noise.
    """

    constant: Seconds = 0.0
    spread: Annotated[tuple[Shift, ...], msgspec.Meta(max_length=1025)] = ()


class Scatter:
    """Draws from quantiles, reproducibly by seed.

    Args:
        quantiles: Evenly spaced; empty: always draw `usual`.
        seed: Random seed; None: always draw `usual`.
        usual: What is drawn without noise.
    """

    def __init__(
        self, quantiles: Sequence[float], seed: Sequence[int] | None, usual: float = 1.0
    ) -> None:
        self._usual = usual
        self._quantiles = np.asarray(() if seed is None else quantiles, np.float64)
        self._places = np.arange(len(self._quantiles))
        self._rng = np.random.default_rng(seed)
        self._drawn = np.full(DRAWS, usual)
        self._at = DRAWS if len(self._quantiles) else 0

    def draw(self) -> float:
        """Draw one value."""
        if not len(self._quantiles):
            return self._usual
        if self._at >= len(self._drawn):
            self.ahead(1)
        self._at += 1
        return self._drawn.item(self._at - 1)

    def ahead(self, count: int) -> NDArray[np.float64]:
        """Return the next values without consuming them; at most `DRAWS`."""
        if self._at + count > len(self._drawn):
            at = self._rng.random(DRAWS) * (len(self._quantiles) - 1)
            fresh = np.interp(at, self._places, self._quantiles)
            self._drawn = np.concatenate([self._drawn[self._at :], fresh])
            self._at = 0
        return self._drawn[self._at : self._at + count]

    def skip(self, count: int) -> None:
        """Consume values returned by `ahead`."""
        if len(self._quantiles):
            self._at += count


class NoisyStepTimes:
    """Durations of consecutive steps, with noise.

    Args:
        cost: Cost model of steps.
        host: Cost model of the time between steps.
        seed: Seed of the noise; None: no noise.
    """

    def __init__(self, cost: StepCost, host: HostCost, seed: Sequence[int] | None) -> None:
        seeds = [None if seed is None else [*seed, part] for part in range(3)]
        self._cost, self._host = cost, host
        self._decode = Scatter(cost.decode_scatter, seeds[0])
        self._prompt = Scatter(cost.prompt_scatter, seeds[1])
        self._between = Scatter(host.scatter, seeds[2])
        self._curve = curve(cost)

    def step_s(self, shape: PlanShape) -> float:
        """Return the duration of the model's part."""
        if not shape.rows:
            return 0.0
        scatter = self._decode if shape.rows == shape.slices else self._prompt
        return self.mean_s(shape) * scatter.draw()

    def mean_s(self, shape: PlanShape) -> float:
        """Return the mean duration of the model's part."""
        cost = self._cost
        fixed = self._rows_s(shape.rows) + cost.sample * shape.samples + cost.pair * shape.pairs
        return fixed + cost.context * shape.context

    def host_s(self, shape: PlanShape) -> float:
        """Return the duration of the host's part."""
        return self._host_mean_s(shape) * self._between.draw()

    def decodes_s(self, shape: PlanShape, steps: int) -> tuple[NDArray[np.float64], ...]:
        """Return what `step_s` and `host_s` will return for decode steps after one of `shape`."""
        cost, rows = self._cost, shape.rows
        contexts = shape.context + rows * np.arange(1, steps + 1)
        fixed = self._rows_s(rows) + cost.sample * rows + cost.pair * 0.0
        model = (fixed + cost.context * contexts) * self._decode.ahead(steps)
        host = self._host_mean_s(shape._replace(starts=0)) * self._between.ahead(steps)
        return model, host

    def skip(self, steps: int) -> None:
        """Consume steps returned by `decodes_s`."""
        self._decode.skip(steps)
        self._between.skip(steps)

    def _host_mean_s(self, shape: PlanShape) -> float:
        host = self._host
        return host.constant + host.slice * shape.slices + host.start * shape.starts

    def _rows_s(self, rows: int) -> float:
        place = bisect_left(KNOTS, rows) - 1
        if place < 0:
            return self._cost.constant
        return self._curve[place] + self._cost.rows[place] * (rows - KNOTS[place])


def curve(cost: StepCost) -> list[float]:
    """Return the modelled seconds at each knot, without other terms."""
    found = [cost.constant]
    for place in range(1, SEGMENTS):
        found.append(found[-1] + cost.rows[place - 1] * (KNOTS[place] - KNOTS[place - 1]))
    return found
