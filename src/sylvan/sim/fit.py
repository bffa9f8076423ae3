"""Fits a profile to a recording, and to the load test that produced it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sylvan.protocol.errors import ConfigError
from sylvan.sim.cost import HostCost, NoisyStepTimes, StepCost
from sylvan.sim.features import KNOTS, SEGMENTS, PlanShape, step_features
from sylvan.sim.observed import Observed, TimedShape, engine_of
from sylvan.sim.profile import Profile, ProfileOrigin

MIN_STEPS = 50
QUANTILES = 257
SCATTER_BETWEEN = (0.0, 99.9)  # number of stored quantiles of measured over modelled times
ROUNDS = 6  # reweighting iterations
SMOOTH = 1e-3  # weight of the smoothness prior for segments without steps
WILD = 4.0  # multiple of the median error beyond which a step is down-weighted

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]


def fit(observed: Observed) -> Profile:
    """Fit the profile, except for time outside the scheduler; see `outside`.

    Raises:
        ConfigError: There are too few steps.
    """
    steps = observed.steps
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            f"{observed.folder} holds {len(steps)} steps; a fit needs at least {MIN_STEPS}"
        )
    step, error = _steps(steps)
    return Profile(
        engine=engine_of(observed.setup),
        step=step,
        host=_hosts(observed.hosts),
        origin=ProfileOrigin(
            recording=str(observed.folder),
            started=observed.setup.started,
            steps=len(steps),
            requests=len(observed.requests),
            max_rows=max(each.shape.rows for each in steps),
            step_error=error,
        ),
    )


def _steps(steps: Sequence[TimedShape]) -> tuple[StepCost, float]:
    features = np.array([step_features(each.shape) for each in steps])
    seconds = np.array([each.seconds for each in steps])
    found = weighted(
        features, seconds, _smoothness(features.shape[1], max(each.shape.rows for each in steps))
    ).tolist()
    cost = StepCost(
        constant=found[0],
        rows=tuple(found[1 : 1 + SEGMENTS]),
        sample=found[-3],
        context=found[-2],
        pair=found[-1],
    )
    times = NoisyStepTimes(cost, HostCost(constant=0.0), None)
    ratios = seconds / np.maximum([times.mean_s(each.shape) for each in steps], 1e-9)
    decodes = np.array([each.shape.is_decode for each in steps])
    cost = StepCost(
        constant=cost.constant,
        rows=cost.rows,
        sample=cost.sample,
        context=cost.context,
        pair=cost.pair,
        decode_scatter=scatter(ratios[decodes]),
        prompt_scatter=scatter(ratios[~decodes]),
    )
    return cost, float(np.mean(np.abs(ratios - 1)))


def _hosts(hosts: Sequence[TimedShape]) -> HostCost:
    if not hosts:
        return HostCost(constant=0.0)
    features = np.array([host_features(each.shape) for each in hosts])
    seconds = np.maximum([each.seconds for each in hosts], 0.0)
    found = weighted(features, seconds)
    ratios = seconds / np.maximum(features @ found, 1e-9)
    constant, each_slice, start = found.tolist()
    return HostCost(constant=constant, slice=each_slice, start=start, scatter=scatter(ratios))


def host_features(shape: PlanShape) -> list[float]:
    """Return the features in the order of the fields of `HostCost`."""
    return [1.0, float(shape.slices), float(shape.starts)]


def scatter(ratios: NDArray[np.float64]) -> tuple[float, ...]:
    """Return quantiles of ratios; their mean corrects the bias of `weighted`."""
    if len(ratios) < MIN_STEPS:
        return ()
    return tuple(np.percentile(ratios, np.linspace(*SCATTER_BETWEEN, QUANTILES)).tolist())


def weighted(features: Matrix, values: Matrix, more: Matrix | None = None) -> Matrix:
    """Return non-negative coefficients that minimise relative errors.

    Args:
        features: One row per measurement.
        values: Measurements.
        more: Additional rows with target 0, relative to the mean measurement.

    Steps that took far longer than modelled, because the machine was disturbed, get less weight.
    """
    found = nonnegative(features, values)
    floor = max(1e-9, float(np.median(values)) / 100)
    for _ in range(ROUNDS):
        expected = np.maximum(features @ found, floor)
        errors = np.abs(values / expected - 1)
        wild = WILD * max(float(np.median(errors)), 1e-3)
        weight = np.sqrt(np.minimum(1.0, wild / np.maximum(errors, 1e-12))) / expected
        rows, wanted = features * weight[:, None], values * weight
        if more is not None:
            scale = np.sqrt(len(values)) / max(float(values.mean()), floor)
            rows = np.concatenate([rows, more * scale])
            wanted = np.concatenate([wanted, np.zeros(len(more))])
        found = nonnegative(rows, wanted)
    return found


def nonnegative(features: Matrix, values: Matrix) -> Matrix:
    """Solve non-negative least squares (Lawson and Hanson, 1974)."""
    # the triangular factor yields the same solution with as many rows as columns
    _, whole = np.linalg.qr(np.column_stack([features, values]))
    scale = np.sqrt((features**2).sum(axis=0))
    rows, wanted = whole[:, :-1] / np.where(scale > 0, scale, 1.0), whole[:, -1]
    found, free = np.zeros(len(scale)), np.zeros(len(scale), np.bool_)
    least = 1e-12 * max(1.0, float(np.abs(rows.T @ wanted).max()))
    for _ in range(10 * len(scale)):
        gain = np.where(free | (scale == 0), -np.inf, rows.T @ (wanted - rows @ found))
        if gain.max() <= least:
            break
        free[int(gain.argmax())] = True
        found = _kept_positive(rows, wanted, found, free)
    return found / np.where(scale > 0, scale, 1.0)


def _kept_positive(rows: Matrix, wanted: Matrix, found: Matrix, free: Mask) -> Matrix:
    """Solve for the `free` coefficients; clamp those that get negative to 0 from now on."""
    while free.any():
        best = np.zeros(len(found))
        best[free] = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
        below = free & (best <= 0)
        if not below.any():
            return best
        step = float((found[below] / (found[below] - best[below] + 1e-300)).min())
        found = found + step * (best - found)
        free &= found > 1e-14
    return np.zeros(len(found))


def _smoothness(count: int, max_rows: int) -> Matrix:
    """Return a prior for the slopes of segments without steps.

    Between observed segments the slope rises late rather than early, as when reading memory
    dominates for small steps. Beyond them the last slope continues.
    """
    rows = np.zeros((SEGMENTS, count))
    for place, knot in enumerate(KNOTS):
        rows[place, 1 + place] = SMOOTH
        if knot >= max_rows and place:
            rows[place, place] = -SMOOTH
    return rows
