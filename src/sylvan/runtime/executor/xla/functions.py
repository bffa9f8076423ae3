"""Compiled functions of an executor: steps by bucket, the head, and sampling.

All are compiled ahead of time, before the first step, so a call never triggers a compilation.
JAX's compilation cache on disk makes the next start fast.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sylvan.kernels.xla import sample
from sylvan.kernels.xla.program import LoweredProgram, Outputs
from sylvan.kernels.xla.values import Weights
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.executor.xla.inputs import num_inputs, unpack
from sylvan.runtime.executor.xla.pool import XlaPool
from sylvan.runtime.executor.xla.sizes import BucketUse, StepBucket, StepBuckets
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

HEAD_ROWS = 16
"""Rows per call of the head outside of steps."""
DRAW_TYPES = {
    "greedy": np.bool_,
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
    "top_k": np.int32,
    "seed": np.int64,
    "sample": np.int64,
    "position": np.int64,
}


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """A program with its weights on a mesh, and the columns of hidden vectors and logits."""

    program: LoweredProgram
    weights: Weights
    hidden_size: int
    vocab_size: int


class StepFunctions:
    """Calls compiled functions with their weights and pages.

    Args:
        loaded: The model.
        pool: KV pool; each step replaces its arrays.
        mesh: The devices.
        buckets: Sizes to compile for.
        use: Counts compilations.
    """

    def __init__(
        self,
        loaded: LoadedProgram,
        pool: XlaPool,
        mesh: Mesh,
        buckets: StepBuckets,
        use: BucketUse,
    ) -> None:
        self._program, self._weights, self._pool = loaded.program, loaded.weights, pool
        self._groups = len(pool.groups)
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._buckets, self._use = buckets, use
        self._hidden_size, self._vocab_size = loaded.hidden_size, loaded.vocab_size
        self._steps: dict[StepBucket, Any] = {}
        self._draws: dict[tuple[int, bool], Any] = {}
        self._head: Any = None
        self._warm = False

    def warm_up(self, clock: Clock = monotonic) -> None:
        """Compile all functions; logs progress."""
        begun = said = clock()
        jobs: list[Callable[[], object]] = [functools.partial(self._step, b) for b in self._buckets]
        for count in sorted({bucket.samples for bucket in self._buckets}):
            jobs += [functools.partial(self._draw, count, greedy) for greedy in (True, False)]
        jobs.append(self._head_function)
        for number, job in enumerate(jobs, 1):
            job()
            if clock() - said > 5 or number == len(jobs):
                said = clock()
                logger.info(
                    "compiled %d of %d functions for JAX in %.1f s", number, len(jobs), said - begun
                )
        self._warm = True

    def step(self, bucket: StepBucket, vector: IntArray) -> Outputs:
        """Start a step; it replaces the arrays of the pool."""
        given = jax.device_put(vector, self._whole)
        self._pool.arrays, found = self._step(bucket)(self._weights, self._pool.arrays, given)
        return found

    def head(self, vectors_RD: np.ndarray) -> np.ndarray:
        """Logits of at most `HEAD_ROWS` float32 vectors: float32 (R, V)."""
        count = len(vectors_RD)
        padded = np.zeros((HEAD_ROWS, self._hidden_size), np.float32)
        padded[:count] = vectors_RD
        given = jax.device_put(padded, self._whole)
        return np.asarray(self._head_function()(self._weights, given))[:count]

    def draw(self, logits_SV: jax.Array, rows: dict[str, np.ndarray] | None) -> np.ndarray:
        """Sample all rows of a bucket: int32 (S,). `rows` None: all rows are greedy."""
        function = self._draw(logits_SV.shape[0], rows is None)
        if rows is None:
            return np.asarray(function(logits_SV))
        with jax.enable_x64(True):
            given = jax.device_put(sample.DrawRows(**rows), self._whole)
            return np.asarray(function(logits_SV, given))

    # ---- compilation

    def _step(self, bucket: StepBucket) -> Any:
        if bucket not in self._steps:
            length = num_inputs(bucket, self._groups)

            def run(weights: Weights, pages: Any, vector: jax.Array) -> Any:
                return self._program.step(weights, pages, unpack(vector, bucket, self._groups))

            kept = jax.tree.map(lambda x: x.sharding, self._pool.arrays)
            function = jax.jit(run, donate_argnums=1, out_shardings=(kept, self._whole))
            vector = self._shape((length,), jnp.int32)
            lowered = function.lower(self._weights, self._pool.arrays, vector)
            self._steps[bucket] = self._compiled(lowered)
        return self._steps[bucket]

    def _head_function(self) -> Any:
        if self._head is None:
            vectors = self._shape((HEAD_ROWS, self._hidden_size), jnp.float32)
            function = jax.jit(self._program.head, out_shardings=self._whole)
            self._head = self._compiled(function.lower(self._weights, vectors))
        return self._head

    def _draw(self, count: int, greedy: bool) -> Any:
        key = count, greedy
        if key not in self._draws:
            logits = self._shape((count, self._vocab_size), jnp.float32)
            if greedy:
                self._draws[key] = self._compiled(jax.jit(sample.greedy).lower(logits))
            else:
                with jax.enable_x64(True):
                    rows = {n: self._shape((count,), kind) for n, kind in DRAW_TYPES.items()}
                    lowered = jax.jit(sample.draw).lower(logits, sample.DrawRows(**rows))
                    self._draws[key] = self._compiled(lowered)
        return self._draws[key]

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)

    def _compiled(self, lowered: Any) -> Any:
        if self._warm:
            self._use.recompiled += 1
        else:
            self._use.compiled += 1
        return lowered.compile()
