"""Attention on several devices, each with some of the heads."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
from jax.sharding import Mesh, PartitionSpec

from sylvan.kernels.xla.attention import Attend, Biases, HeadSpec, Tiles

Array: TypeAlias = jax.Array


class ShardedAttend:
    """Implements `Attend`: each device attends with its own heads, without communication.

    If the heads do not divide evenly, each device computes all of them.
    """

    def __init__(self, inner: Attend, mesh: Mesh, axis: str) -> None:
        self._inner, self._mesh, self._axis = inner, mesh, axis

    def __call__(
        self,
        q_NBHD: Array,
        keys: Array,
        values: Array | None,
        tiles: Tiles,
        spec: HeadSpec,
        biases: Biases,
    ) -> Array:
        count = self._mesh.shape[self._axis]
        if spec.num_heads % count or spec.num_kv_heads % count:
            own, heads, pages, vector = spec, *[PartitionSpec()] * 3
        else:
            own = dataclasses.replace(
                spec, num_heads=spec.num_heads // count, num_kv_heads=spec.num_kv_heads // count
            )
            heads = PartitionSpec(None, None, self._axis)
            pages, vector = PartitionSpec(None, self._axis), PartitionSpec(self._axis)
        whole = PartitionSpec()

        def run(
            q: Array,
            k: Array,
            v: Array | None,
            numbers: Any,
            extra: Biases,
        ) -> Array:
            return self._inner(q, k, v, Tiles(*numbers), own, extra)

        around = jax.sharding.get_abstract_mesh()  # set where device groups have different requests
        mapped = jax.shard_map(
            run,
            mesh=self._mesh if around.empty else around,
            in_specs=(heads, pages, pages, whole, vector),
            out_specs=heads,
            axis_names={self._axis},
            check_vma=False,
        )
        numbers = tiles.rows, tiles.places, tiles.ends, tiles.tables
        return mapped(q_NBHD, keys, values, numbers, biases)
