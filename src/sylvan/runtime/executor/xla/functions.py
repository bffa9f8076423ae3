"""Compiled functions of a JAX executor: a step per bucket, the LM head, and sampling.

All are compiled before the first step, so that no call triggers a compilation.
JAX's compilation cache on disk makes the next start fast.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sylvan.kernels.xla import sample
from sylvan.kernels.xla.program import LoweredProgram, Outputs, ProgramMemory, ReadArrays
from sylvan.kernels.xla.values import Weights
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.executor.xla.inputs import num_inputs, unpack
from sylvan.runtime.executor.xla.memory import XlaMemory
from sylvan.runtime.executor.xla.sizes import BucketUse, StepBucket, StepBuckets
from sylvan.runtime.executor.xla.weights import DATA
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

HEAD_ROWS = 16
"""Maximum rows of a call of the head outside of steps."""
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


Edits = tuple[tuple[Any, Any], ...]
"""For each edit of the program: vectors (T, D), and the mask of rows that have one (T,)."""


class StepFunctions:
    """Calls compiled functions with their weights and pages.

    Args:
        loaded: The model.
        memory: Pages and states, which each step replaces.
        mesh: The devices.
        buckets: Sizes to compile for.
        use: Counts compilations.

    Attributes:
        kinds: Which inputs the model's steps have.
        num_edits: Layers whose outputs a step may replace or change by given vectors.
    """

    def __init__(
        self,
        loaded: LoadedProgram,
        memory: XlaMemory,
        mesh: Mesh,
        buckets: StepBuckets,
        use: BucketUse,
    ) -> None:
        self._program, self._weights, self._memory = loaded.program, loaded.weights, memory
        self.kinds, self.num_edits = memory.kinds, len(loaded.program.ends.edits)
        self._mesh = mesh
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._by_group = NamedSharding(mesh, PartitionSpec(DATA))
        self._buckets, self._use = buckets, use
        self._hidden_size, self._vocab_size = loaded.hidden_size, loaded.vocab_size
        self._steps: dict[tuple[StepBucket, bool], Any] = {}
        self._draws: dict[tuple[int, bool], Any] = {}
        self._head: Any = None
        self._warm = False

    def warm_up(self, clock: Clock = monotonic) -> None:
        """Compile all functions; logs progress."""
        begun = said = clock()
        jobs: list[Callable[[], object]] = [
            functools.partial(self._step, b, edited)
            for b in self._buckets
            for edited in ((False, True) if self.num_edits and not b.decodes else (False,))
        ]
        for count in sorted({self.kinds.shards * bucket.samples for bucket in self._buckets}):
            jobs += [functools.partial(self._draw, count, greedy) for greedy in (True, False)]
        jobs += [self._head_function, self._memory.adapters.warm_up]
        if self._memory.items is not None:
            jobs.append(self._memory.items.warm_up)
        for number, job in enumerate(jobs, 1):
            job()
            if clock() - said > 5 or number == len(jobs):
                said = clock()
                logger.info(
                    "compiled %d of %d functions for JAX in %.1f s", number, len(jobs), said - begun
                )
        self._warm = True

    def shape_of(self, bucket: StepBucket) -> Any:
        """Trace a step without weights on devices, to find what PyTorch modules read."""
        return jax.eval_shape(self._traced(bucket), *self._given(bucket, edited=False))

    def step(self, bucket: StepBucket, vectors_GN: IntArray, edits: Edits = ()) -> Outputs:
        """Start a step from each group's packed inputs; it replaces the arrays of the memory.

        The rows of all groups are concatenated in the results, and so are the sampled rows.
        """
        vectors = jax.device_put(vectors_GN, self._by_group)
        edits = jax.device_put(edits, self._whole)
        self._memory.adapters.refresh()
        function = self._step(bucket, bool(edits))
        kept, found = function(
            self._weights, self._memory.take(), vectors, self._memory.read, edits
        )
        self._memory.put(kept)
        return found

    def head(self, vectors_RD: np.ndarray, slots_R: IntArray | None = None) -> np.ndarray:
        """Logits of at most `HEAD_ROWS` float32 vectors with their adapters: float32 (R, V)."""
        count = len(vectors_RD)
        padded = np.zeros((HEAD_ROWS, self._hidden_size), np.float32)
        padded[:count] = vectors_RD
        slots = np.full(HEAD_ROWS, -1, np.int32)
        if slots_R is not None and len(slots_R):
            slots[:count] = slots_R
        given = jax.device_put((padded, slots), self._whole)
        function, adapters = self._head_function(), self._memory.adapters.arrays
        return np.asarray(function(self._weights, *given, adapters))[:count]

    def draw(self, logits_SV: jax.Array, rows: dict[str, np.ndarray] | None) -> np.ndarray:
        """Sample all rows of a bucket: int32 (S,). `rows` None: all rows are greedy."""
        function = self._draw(logits_SV.shape[0], rows is None)
        if rows is None:
            return np.asarray(function(logits_SV))
        with jax.enable_x64(True):
            given = jax.device_put(sample.DrawRows(**rows), self._by_group)
            return np.asarray(function(logits_SV, given))

    # ---- compilation

    def _traced(self, bucket: StepBucket) -> Callable[..., Any]:
        kinds = self.kinds

        def run(
            weights: Weights,
            memory: ProgramMemory,
            vectors: jax.Array,
            read: ReadArrays,
            edits: Edits,
        ) -> Any:
            inputs = replace(unpack(vectors[0], bucket, kinds), edits=edits)
            kept, found = self._program.step(weights, memory, inputs, read)
            if kinds.shards > 1:  # counted in rows of all groups
                found = replace(found, loads=[jax.lax.psum(x, DATA) for x in found.loads])
            return kept, found

        if kinds.shards == 1:
            return run
        whole, by_group = PartitionSpec(), PartitionSpec(DATA)
        outputs: Any = Outputs(logits=by_group, hidden=by_group, layers=by_group, loads=whole)
        return jax.shard_map(
            run,
            mesh=self._mesh,
            in_specs=(whole, by_group, by_group, whole, whole),
            out_specs=(by_group, outputs),
            axis_names={DATA},
            check_vma=False,
        )

    def _given(self, bucket: StepBucket, *, edited: bool) -> tuple[Any, ...]:
        """Return the shapes of a step's arguments."""
        size = self.kinds.shards, num_inputs(bucket, self.kinds)
        vectors = jax.ShapeDtypeStruct(size, jnp.int32, sharding=self._by_group)
        edit = (
            self._shape((bucket.rows, self._hidden_size), jnp.float32),
            self._shape((bucket.rows,), jnp.bool_),
        )
        edits = (edit,) * self.num_edits if edited else ()
        return self._weights, self._memory.take(), vectors, self._memory.read, edits

    def _step(self, bucket: StepBucket, edited: bool) -> Any:
        if (bucket, edited) not in self._steps:
            given = self._given(bucket, edited=edited)
            kept = jax.tree.map(lambda x: x.sharding, given[1])
            found: Any = Outputs(
                logits=self._by_group,
                hidden=self._by_group,
                layers=self._by_group,
                loads=self._whole,
            )
            function = jax.jit(self._traced(bucket), donate_argnums=1, out_shardings=(kept, found))
            self._steps[bucket, edited] = self._compiled(function.lower(*given))
        return self._steps[bucket, edited]

    def _head_function(self) -> Any:
        if self._head is None:
            vectors = self._shape((HEAD_ROWS, self._hidden_size), jnp.float32)
            slots = self._shape((HEAD_ROWS,), jnp.int32)
            function = jax.jit(self._program.head, out_shardings=self._whole)
            lowered = function.lower(self._weights, vectors, slots, self._memory.adapters.arrays)
            self._head = self._compiled(lowered)
        return self._head

    def _draw(self, count: int, greedy: bool) -> Any:
        key = count, greedy
        if key not in self._draws:
            logits = self._by_rows((count, self._vocab_size), jnp.float32)
            if greedy:
                self._draws[key] = self._compiled(jax.jit(sample.greedy).lower(logits))
            else:
                with jax.enable_x64(True):
                    rows = {n: self._by_rows((count,), kind) for n, kind in DRAW_TYPES.items()}
                    lowered = jax.jit(sample.draw).lower(logits, sample.DrawRows(**rows))
                    self._draws[key] = self._compiled(lowered)
        return self._draws[key]

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)

    def _by_rows(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._by_group)

    def _compiled(self, lowered: Any) -> Any:
        if not self._warm:
            self._use.compiled += 1
        return lowered.compile()
