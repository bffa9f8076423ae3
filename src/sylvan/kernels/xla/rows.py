"""Lowerings of ops on rows. Sums, norms and functions are computed in float32, as on CPUs.

Shapes: T rows of the op, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import jax
import jax.numpy as jnp

from sylvan.kernels.native.graph import HostCall
from sylvan.kernels.native.opset import (
    Activation,
    Add,
    Cast,
    Clamp,
    ClampForm,
    Embed,
    Function,
    Glu,
    LayerNorm,
    Linear,
    ResidualStream,
    RmsNorm,
    Scale,
    ScaleRows,
    Softcap,
    TakeRows,
    Xielu,
)
from sylvan.kernels.xla.grouped import grouped
from sylvan.kernels.xla.values import Values, precision

Array: TypeAlias = jax.Array

FUNCTIONS: Mapping[Function, Callable[[Array], Array]] = MappingProxyType(
    {
        Function.SILU: jax.nn.silu,
        Function.GELU: lambda x: jax.nn.gelu(x, approximate=False),
        Function.GELU_TANH: lambda x: jax.nn.gelu(x, approximate=True),
        Function.RELU: jax.nn.relu,
        Function.RELU2: lambda x: jnp.square(jax.nn.relu(x)),
        Function.SIGMOID: jax.nn.sigmoid,
        Function.TANH: jnp.tanh,
        Function.QUICK_GELU: lambda x: x * jax.nn.sigmoid(1.702 * x),
    }
)


def embed(v: Values, op: Embed) -> None:
    """Rows of a matrix; with `is_part` other ids give zeros."""
    (weight,) = v.matrix(op.weight)
    ids = v.step.sources[op.source] - op.first_row
    rows = weight[jnp.clip(ids, 0, op.vocab_rows - 1)].astype(jnp.float32) * op.scale
    if op.is_part:
        rows = jnp.where(((ids >= 0) & (ids < op.vocab_rows))[:, None], rows, 0.0)
    v.buffers[op.out] = rows


def rms_norm(v: Values, op: RmsNorm) -> None:
    """Rows over their root mean square, times a weight."""
    total = _normed(v, op.stream)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(total), -1, keepdims=True) + op.eps)
    v.put(op.out, total * inverse * v.vector(op.weight, op.cols), op)


def layer_norm(v: Values, op: LayerNorm) -> None:
    """Rows minus their mean, over their standard deviation, times a weight, plus a bias."""
    total = _normed(v, op.stream)
    centred = total - total.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + op.eps)
    out = centred * inverse * v.vector(op.weight, op.cols)
    bias = v.optional(op.bias, op.cols)
    v.put(op.out, out if bias is None else out + bias, op)


def _normed(v: Values, stream: ResidualStream) -> Array:
    """The rows to norm; a residual is updated."""
    if stream.residual is None:
        assert stream.x is not None
        return v.wide(stream.x)
    total = v.wide(stream.residual if stream.base is None else stream.base)
    if stream.x is not None:
        total = total + v.wide(stream.x)
    v.buffers[stream.residual] = total
    return total


def linear(v: Values, op: Linear) -> None:
    """Rows times a matrix, plus a bias; with groups each group of rows by its own matrix."""
    if op.groups is not None:
        grouped(v, op)
        return
    x, parts = v.rows(op.x), v.matrix(op.weight)
    sizes = [weight.shape[0] for weight in parts]
    bias = v.optional(op.bias, sum(sizes))
    dtype = jnp.float32 if op.out_f32 else x.dtype
    found: list[Array] = []
    start = 0
    for weight, size in zip(parts, sizes, strict=True):
        out = product(x, weight)
        if bias is not None:
            out = out + bias[start : start + size]
        found.append(out.astype(dtype))
        start += size
    v.buffers[op.out] = found[0] if len(found) == 1 else tuple(found)


def product(x: Array, weight: Array) -> Array:
    """(T, C) times (outputs, C), in float32."""
    return jax.lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision(x.dtype),
        preferred_element_type=jnp.float32,
    )


def glu(v: Values, op: Glu) -> None:
    """A function of the first half of each row, times the second half."""
    halves = v.parts(op.gate_up, (op.cols, op.cols))
    gate, up = (half.astype(jnp.float32) for half in halves)
    if op.clamp != ClampForm.NONE:
        up = jnp.clip(up, -op.limit, op.limit)
    if op.clamp in {ClampForm.GPT_OSS, ClampForm.INPUTS}:
        gate = jnp.minimum(gate, op.limit)
    if op.clamp == ClampForm.GPT_OSS:
        out = (up + 1) * gate * jax.nn.sigmoid(gate * op.alpha)
    elif op.clamp == ClampForm.OUTPUTS:
        out = jnp.minimum(FUNCTIONS[op.function](gate), op.limit) * up
    else:
        out = FUNCTIONS[op.function](gate) * up
    v.put(op.out, out, op)


def activation(v: Values, op: Activation) -> None:
    """A function of each number."""
    v.put(op.out, FUNCTIONS[op.function](v.wide(op.x)), op)


def xielu(v: Values, op: Xielu) -> None:
    """See `Xielu`."""
    alpha_p, alpha_n, beta, eps = (
        v.vector(ref, 1)[0] for ref in (op.alpha_p, op.alpha_n, op.beta, op.eps)
    )
    x = v.wide(op.x)
    above = jax.nn.softplus(alpha_p) * jnp.square(x)
    below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + jax.nn.softplus(alpha_n))
    v.put(op.out, jnp.where(x > 0, above, below) + beta * x, op)


def take_rows(v: Values, op: TakeRows) -> None:
    """Select the rows that need logits."""
    v.put(op.out, v.rows(op.x)[v.step.sample_rows], op)


def add(v: Values, op: Add) -> None:
    """Compute a + scale b, in the type of a."""
    v.put(op.out, v.wide(op.a) + v.wide(op.b) * op.scale, op, wide=op.a_f32)


def scale(v: Values, op: Scale) -> None:
    """Rows times a number."""
    v.put(op.out, v.wide(op.x) * op.factor, op, wide=op.f32)


def softcap(v: Values, op: Softcap) -> None:
    """See `Softcap`."""
    v.put(op.out, jnp.tanh(v.wide(op.x) / op.cap) * op.cap, op, wide=op.f32)


def clamp(v: Values, op: Clamp) -> None:
    """See `Clamp`."""
    v.put(op.out, jnp.clip(v.wide(op.x), -op.limit, op.limit), op)


def cast(v: Values, op: Cast) -> None:
    """Float32 rows as the rows' type."""
    v.put(op.out, v.rows(op.x), op)


def scale_rows(v: Values, op: ScaleRows) -> None:
    """Rows, each times column 0 of its factors."""
    v.put(op.out, v.wide(op.x) * v.wide(op.factors)[:, :1], op)


def host_call(v: Values, op: HostCall) -> None:
    """Run a PyTorch module whose functions are lowered to JAX."""
    assert v.call is not None, "a graph with host calls was lowered without their modules"
    x = v.wide(op.x) if op.x_f32 else v.rows(op.x)
    v.put(op.out, v.call(v, op.function, x[:, : op.cols]), op)
