"""Writes the sampling parameters of a step into the host copy of its inputs; numpy only."""

from __future__ import annotations

import numpy as np

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.executor.inputs import Arrays
from sylvan.runtime.sampling.params import NO_TOP_K, SamplingSlots
from sylvan.runtime.sampling.philox import uniform

_SAME_NAME = (
    "greedy",
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "sample",
    "frequency",
    "presence",
    "repetition",
)


def fill_sampling(
    arrays: Arrays, slots: IntArray, positions: np.ndarray, params: SamplingSlots
) -> None:
    """Write the parameters of rows that sample; positions are those of the sampled tokens."""
    count = len(slots)
    for name in _SAME_NAME:
        arrays[name][:count] = getattr(params, name)[slots]
    arrays["top_k"][:count] = np.minimum(params.top_k[slots], NO_TOP_K)
    arrays["slots"][:count] = slots
    arrays["position"][:count] = positions


def fill_uniform(
    arrays: Arrays, slots: IntArray, positions: np.ndarray, params: SamplingSlots
) -> None:
    """Write random numbers generated on the host, for kernels that generate none."""
    count = len(slots)
    arrays["uniform"][:count] = uniform(params.seed[slots], params.sample[slots], positions)
