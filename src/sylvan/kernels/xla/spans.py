"""Recurrent layers: rows of each request in order, starting from the request's state.

Shapes: T rows, R requests, S state slots, K taps, C channels. Slot S does not exist: writes to it
are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import torch

from sylvan.kernels.scan import TorchScans
from sylvan.kernels.scan.spans import Step
from sylvan.kernels.xla.tensors import JaxTensor
from sylvan.kernels.xla.values import StateRows

Array: TypeAlias = jax.Array


class XlaSpans:
    """Replaces `kernels.scan.Spans` while JAX traces a step.

    Args:
        rows: Rows of the step.
        value: Returns the JAX value of a tensor.
    """

    def __init__(self, rows: StateRows, value: Callable[[torch.Tensor], Array]) -> None:
        self.rows, self.value = rows, value

    def scan(self, state_S: torch.Tensor, out_T: torch.Tensor, step: Step) -> torch.Tensor:
        """See `kernels.scan.spans.scan`: one row of every request at a time."""
        assert isinstance(state_S, JaxTensor)
        rows, state = self.rows, state_S.value
        held = state.at[rows.slots].get(mode="clip")
        out = self.value(out_T)

        def one(at: Array, held: Array) -> tuple[Array, Array]:
            new, made = step(JaxTensor(held), JaxTensor(at))
            return self.value(new).astype(state.dtype), self.value(made).astype(out.dtype)

        if rows.single:
            every = jnp.arange(len(rows.starts), dtype=jnp.int32)
            held, out = one(every, held)
            for saved in rows.saves:
                state = state.at[saved].set(held, mode="drop")
        else:
            state, held, out = _walked(rows, (state, held, out), one)
        state_S.value = state.at[rows.slots].set(held, mode="drop")
        return JaxTensor(out)


def _walked(
    rows: StateRows,
    values: tuple[Array, Array, Array],
    one: Callable[[Array, Array], tuple[Array, Array]],
) -> tuple[Array, Array, Array]:
    """Steps until the longest request is done: all slots, states of requests, and outputs."""
    most, last = rows.counts.max(initial=0), rows.places.shape[0] - 1
    slots = values[0].shape[0]

    def more(carry: tuple[Array, Array, Array, Array]) -> Array:
        return carry[0] < most

    def body(
        carry: tuple[Array, Array, Array, Array],
    ) -> tuple[Array, Array, Array, Array]:
        number, state, held, out = carry
        at, active = jnp.minimum(rows.starts + number, last), number < rows.counts
        new, made = one(at, held)
        held = jnp.where(active.reshape(-1, *(1,) * (held.ndim - 1)), new, held)
        out = out.at[jnp.where(active, at, last + 1)].set(made, mode="drop")
        for saved in rows.saves:
            state = state.at[jnp.where(active, saved[at], slots)].set(held, mode="drop")
        return number + 1, state, held, out

    _, state, held, out = jax.lax.while_loop(more, body, (jnp.int32(0), *values))
    return state, held, out


class XlaScans(TorchScans):
    """Convolutions of all rows at once; state spaces and delta rules row by row."""

    def conv(
        self,
        x_TC: torch.Tensor,
        weight_CK: torch.Tensor,
        bias_C: torch.Tensor | None,
        state_SKC: torch.Tensor,
        spans: object,
        *,
        silu: bool = False,
    ) -> torch.Tensor:
        """See `Scans.conv`. The window of a row is also the state after it."""
        assert isinstance(spans, XlaSpans)
        assert isinstance(state_SKC, JaxTensor)
        rows, state = spans.rows, state_SKC.value
        x, weight_KC = spans.value(x_TC), spans.value(weight_CK).astype(jnp.float32).T
        window = _windows(x.astype(state.dtype), state, rows, len(weight_KC))
        total = jnp.zeros(x.shape, jnp.float32)
        for held, factor in zip(window, weight_KC, strict=True):
            total = total + held.astype(jnp.float32) * factor
        if bias_C is not None:
            total = total + spans.value(bias_C).astype(jnp.float32)
        out = total.astype(x.dtype)
        if silu:
            out = jax.nn.silu(out.astype(jnp.float32)).astype(x.dtype)
        slots = state.shape[0]
        following = jnp.concatenate((rows.places[1:], jnp.zeros(1, jnp.int32)))
        own = jnp.where(following == 0, rows.row_slots, slots)  # of the last row of a request
        after_TKC = jnp.stack(window, 1)
        for targets in (*rows.saves, own):
            state = state.at[targets].set(after_TKC, mode="drop")
        state_SKC.value = state
        return JaxTensor(out)


def _windows(x_TC: Array, state_SKC: Array, rows: StateRows, taps: int) -> Sequence[Array]:
    """The last inputs of each row, the oldest first: as many arrays (T, C) as there are taps."""
    numbers = jnp.arange(x_TC.shape[0], dtype=jnp.int32)
    found: list[Array] = []
    for tap in range(taps):
        place = rows.places + 1 + tap  # in the state and the request's rows, one after another
        before = state_SKC.at[rows.row_slots, jnp.minimum(place, taps - 1)].get(mode="clip")
        own = x_TC[jnp.maximum(numbers + 1 + tap - taps, 0)]
        found.append(jnp.where((place < taps)[:, None], before, own))
    return found
