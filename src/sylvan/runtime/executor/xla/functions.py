"""Compiled functions of an executor: steps by bucket, the head, and sampling.

All are compiled ahead of time, before the first step, so a call never triggers a compilation.
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
from sylvan.kernels.xla.program import LoweredProgram, Outputs, ProgramMemory
from sylvan.kernels.xla.values import Weights
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.executor.xla.adapters import XlaAdapters
from sylvan.runtime.executor.xla.inputs import InputKinds, num_inputs, unpack
from sylvan.runtime.executor.xla.pool import XlaPool
from sylvan.runtime.executor.xla.sizes import BucketUse, StepBucket, StepBuckets
from sylvan.runtime.executor.xla.states import XlaStates
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


@dataclass(frozen=True, slots=True)
class XlaMemory:
    """Arrays that steps consume and replace, and the adapters that they read."""

    pool: XlaPool
    states: XlaStates | None
    adapters: XlaAdapters

    @property
    def kinds(self) -> InputKinds:
        """Inputs of a step."""
        states = self.states
        slots = 0 if states is None else states.num_slots + states.num_branches
        return InputKinds(len(self.pool.groups), slots, self.adapters.rows is not None)

    def take(self) -> ProgramMemory:
        """The arrays; a step that consumes them must `put` its own."""
        states = self.states.arrays if self.states is not None else {}
        return ProgramMemory(
            dict(self.pool.arrays), {part: found[0] for part, found in states.items()}
        )

    def put(self, memory: ProgramMemory) -> None:
        """Replace all arrays."""
        self.pool.arrays.update(memory.pages)
        if self.states is not None:
            self.states.arrays.update({part: (x, None) for part, x in memory.states.items()})


Edits = tuple[tuple[Any, Any], ...]
"""Vectors (T, D) and which rows have one (T,), for each edit of the program; () for none."""


class StepFunctions:
    """Calls compiled functions with their weights and pages.

    Args:
        loaded: The model.
        memory: Pages and states, which each step replaces.
        mesh: The devices.
        buckets: Sizes to compile for.
        use: Counts compilations.

    Attributes:
        kinds: What the vector of a step has.
        num_edits: Buffers that vectors of a step may change.
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
        self._whole = NamedSharding(mesh, PartitionSpec())
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
        for count in sorted({bucket.samples for bucket in self._buckets}):
            jobs += [functools.partial(self._draw, count, greedy) for greedy in (True, False)]
        jobs += [self._head_function, self._memory.adapters.warm_up]
        for number, job in enumerate(jobs, 1):
            job()
            if clock() - said > 5 or number == len(jobs):
                said = clock()
                logger.info(
                    "compiled %d of %d functions for JAX in %.1f s", number, len(jobs), said - begun
                )
        self._warm = True

    def shape_of(self, bucket: StepBucket) -> Any:
        """Trace a step without weights on devices: what modules of PyTorch read becomes known."""
        return jax.eval_shape(self._traced(bucket), *self._given(bucket, edited=False))

    def step(self, bucket: StepBucket, vector: IntArray, edits: Edits = ()) -> Outputs:
        """Start a step; it replaces the arrays of the memory."""
        given = jax.device_put((vector, edits), self._whole)
        adapters = self._memory.adapters
        adapters.refresh()
        function = self._step(bucket, bool(edits))
        kept, found = function(
            self._weights, self._memory.take(), given[0], adapters.arrays, given[1]
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
            given = jax.device_put(sample.DrawRows(**rows), self._whole)
            return np.asarray(function(logits_SV, given))

    # ---- compilation

    def _traced(self, bucket: StepBucket) -> Callable[..., Any]:
        kinds = self.kinds

        def run(
            weights: Weights, memory: ProgramMemory, vector: jax.Array, adapters: Any, edits: Edits
        ) -> Any:
            inputs = replace(unpack(vector, bucket, kinds), edits=edits)
            return self._program.step(weights, memory, inputs, adapters)

        return run

    def _given(self, bucket: StepBucket, *, edited: bool) -> tuple[Any, ...]:
        """Arguments of a step, as far as their shapes go."""
        vector = self._shape((num_inputs(bucket, self.kinds),), jnp.int32)
        edit = (
            self._shape((bucket.rows, self._hidden_size), jnp.float32),
            self._shape((bucket.rows,), jnp.bool_),
        )
        edits = (edit,) * self.num_edits if edited else ()
        return self._weights, self._memory.take(), vector, self._memory.adapters.arrays, edits

    def _step(self, bucket: StepBucket, edited: bool) -> Any:
        if (bucket, edited) not in self._steps:
            given = self._given(bucket, edited=edited)
            kept = jax.tree.map(lambda x: x.sharding, given[1])
            function = jax.jit(
                self._traced(bucket), donate_argnums=1, out_shardings=(kept, self._whole)
            )
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
