"""PyTorch functions called by modules of native models, implemented with `jax.numpy`.

Names and arguments are those of ATen; its other functions decompose into these. Type promotion
follows PyTorch's rules, which for these functions equal JAX's. Source: PyTorch's
native_functions.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch

from sylvan.kernels.xla.values import precision

Array: TypeAlias = jax.Array
Dims = int | Sequence[int] | None

TORCH_TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "int64": torch.int64,
        "int32": torch.int32,
        "int16": torch.int16,
        "int8": torch.int8,
        "uint8": torch.uint8,
        "bool": torch.bool,
    }
)
"""Types by JAX's name; JAX has no int64 here, so int64 tensors become int32."""
_NAMES = {kind: name for name, kind in TORCH_TYPES.items()} | {
    torch.int64: "int32",
    torch.float64: "float32",
}
_ACCUMULATED = jnp.float32


def _type(kind: torch.dtype | None, default: Any) -> Any:
    return default if kind is None else jnp.dtype(_NAMES[kind])


def _wide(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Computed in float32 and rounded once, as PyTorch does on CPUs; integers become floats."""

    def run(x: Array) -> Array:
        kind = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else _ACCUMULATED
        return function(x.astype(jnp.float32)).astype(kind)

    return run


# ---- arithmetic
def _add(a: Any, b: Any, alpha: float = 1) -> Array:
    return jnp.add(a, b if alpha == 1 else b * alpha)


def _sub(a: Any, b: Any, alpha: float = 1) -> Array:
    return jnp.subtract(a, b if alpha == 1 else b * alpha)


def _rsub(a: Any, b: Any, alpha: float = 1) -> Array:
    return _sub(b, a, alpha)


def _div(a: Any, b: Any, rounding_mode: str | None = None) -> Array:
    if rounding_mode is None:
        return jnp.true_divide(a, b)
    found = jnp.floor_divide(a, b) if rounding_mode == "floor" else jnp.trunc(a / b)
    return found.astype(jnp.result_type(a, b))


def _clamp(x: Array, *bounds: Any, **named: Any) -> Array:
    low, high = (*bounds, None, None)[:2]
    return jnp.clip(x, named.get("min", low), named.get("max", high))


def _softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    wide = x.astype(jnp.float32) * beta
    found = jnp.where(wide > threshold, wide, jnp.log1p(jnp.exp(wide))) / beta
    return found.astype(x.dtype)


def _gelu(x: Array, approximate: str = "none") -> Array:
    wide = x.astype(jnp.float32)
    return jax.nn.gelu(wide, approximate=approximate == "tanh").astype(x.dtype)


def _log_sigmoid(x: Array) -> tuple[Array, Array]:
    return _wide(jax.nn.log_sigmoid)(x), jnp.zeros(0, x.dtype)


def _masked_fill(x: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


def _where(condition: Array, a: Any, b: Any) -> Array:
    return jnp.where(condition, a, b)


# ---- sums
def _dims(dim: Dims) -> int | tuple[int, ...] | None:
    if dim is None or isinstance(dim, int):
        return dim
    return tuple(dim) or None


def _sum(x: Array, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Array:
    kind = _type(dtype, x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
    return x.astype(_of_sum(kind)).sum(_dims(dim), keepdims=keepdim).astype(kind)


def _mean(x: Array, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Array:
    kind = _type(dtype, x.dtype)
    return x.astype(_of_sum(kind)).mean(_dims(dim), keepdims=keepdim).astype(kind)


def _of_sum(kind: Any) -> Any:
    return _ACCUMULATED if jnp.issubdtype(kind, jnp.floating) else kind


def _amax(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return x.max(_dims(dim), keepdims=keepdim)


def _vector_norm(
    x: Array,
    power: float = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Array:
    assert power == 2
    wide = jnp.square(x.astype(jnp.float32)).sum(_dims(dim), keepdims=keepdim)
    return jnp.sqrt(wide).astype(_type(dtype, x.dtype))


def _softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    found = jax.nn.softmax(x.astype(jnp.float32), dim)
    return found if half_to_float else found.astype(x.dtype)


def _layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    over = tuple(range(-len(shape), 0))
    out, mean, inverse = _centred(x.astype(jnp.float32), over, eps)
    out = out if weight is None else out * weight.astype(jnp.float32)
    out = out if bias is None else out + bias.astype(jnp.float32)
    return out.astype(x.dtype), mean, inverse


def _rms_norm(
    x: Array, shape: Sequence[int], weight: Array | None = None, eps: float | None = None
) -> tuple[Array, Array]:
    over, wide = tuple(range(-len(shape), 0)), x.astype(jnp.float32)
    least = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(over, keepdims=True) + least)
    out = wide * inverse
    out = out if weight is None else out * weight.astype(jnp.float32)
    return out.astype(x.dtype), inverse


def _group_norm(
    x: Array, weight: Array | None, bias: Array | None, *sizes: Any
) -> tuple[Array, Array, Array]:
    """`sizes`: rows, channels, numbers of a channel, groups and epsilon."""
    count, channels, size, groups, eps = sizes
    wide = x.astype(jnp.float32).reshape(count, groups, -1)
    out, mean, inverse = _centred(wide, (-1,), eps)
    out = out.reshape(count, channels, size)
    out = out if weight is None else out * weight.astype(jnp.float32)[:, None]
    out = out if bias is None else out + bias.astype(jnp.float32)[:, None]
    return out.reshape(x.shape).astype(x.dtype), mean[..., 0], inverse[..., 0]


def _centred(x: Array, over: tuple[int, ...], eps: float) -> tuple[Array, Array, Array]:
    mean = x.mean(over, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(x - mean).mean(over, keepdims=True) + eps)
    return (x - mean) * inverse, mean, inverse


# ---- products
def _matmul(a: Array, b: Array) -> Array:
    kind = jnp.result_type(a, b)
    found = jnp.matmul(a, b, precision=precision(kind), preferred_element_type=_of_sum(kind))
    return found.astype(kind)


def _addmm(bias: Array, a: Array, b: Array, beta: float = 1, alpha: float = 1) -> Array:
    product = _matmul(a.astype(jnp.float32), b.astype(jnp.float32)) * alpha
    return (product + bias.astype(jnp.float32) * beta).astype(a.dtype)


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    kind = x.dtype
    wide = jnp.matmul(x, weight.T, precision=precision(kind), preferred_element_type=_of_sum(kind))
    return (wide if bias is None else wide + bias.astype(wide.dtype)).astype(kind)


# ---- shapes
def _view(x: Array, size: Sequence[int]) -> Array:
    return x.reshape(tuple(size))


def _expand(x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    del implicit
    own = (1,) * (len(size) - x.ndim) + x.shape
    whole = tuple(b if a == -1 else a for a, b in zip(size, own, strict=True))
    return jnp.broadcast_to(x, whole)


def _transpose(x: Array, a: int, b: int) -> Array:
    return jnp.swapaxes(x, a, b)


def _t(x: Array) -> Array:
    return x.T


def _squeeze(x: Array, dim: Dims = None) -> Array:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp.squeeze(x, tuple(d for d in dims if x.shape[d] == 1))


def _slice(
    x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    place = [slice(None)] * x.ndim
    place[dim] = slice(start, None if end is None or end >= x.shape[dim] else end, step)
    return x[tuple(place)]


def _select(x: Array, dim: int, index: int) -> Array:
    return jax.lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


def _split(x: Array, size: int | Sequence[int], dim: int = 0) -> list[Array]:
    whole = x.shape[dim]
    sizes = [size] * (whole // size) if isinstance(size, int) else list(size)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return jnp.split(x, ends if ends and ends[-1] < whole else ends[:-1], dim)


def _unbind(x: Array, dim: int = 0) -> list[Array]:
    return [_select(x, dim, i) for i in range(x.shape[dim])]


def _cat(parts: Sequence[Array], dim: int = 0) -> Array:
    return jnp.concatenate(list(parts), dim)


def _stack(parts: Sequence[Array], dim: int = 0) -> Array:
    return jnp.stack(list(parts), dim)


def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[_places(indices)]


def _places(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _index_put(
    x: Array, indices: Sequence[Array | None], values: Any, accumulate: bool = False
) -> Array:
    place = x.at[_places(indices)]
    values = jnp.asarray(values, x.dtype)
    return place.add(values) if accumulate else place.set(values)


def _index_select(x: Array, dim: int, index: Array) -> Array:
    return jnp.take(x, index, dim)


def _gather(x: Array, dim: int, index: Array) -> Array:
    return jnp.take_along_axis(x, index, dim)


def _repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


def _topk(
    x: Array, k: int, dim: int = -1, largest: bool = True, ordered: bool = True
) -> tuple[Array, Array]:
    del ordered
    rows = jnp.moveaxis(x if largest else -x, dim, -1)
    best, places = jax.lax.top_k(rows, k)
    return jnp.moveaxis(best if largest else -best, -1, dim), jnp.moveaxis(places, -1, dim)


def _sort(
    x: Array, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> tuple[Array, Array]:
    del stable
    order = jnp.argsort(x, dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, dim), order


def _embedding(weight: Array, ids: Array, *args: Any) -> Array:
    del args
    return weight[ids]


# ---- new tensors
def _cast(x: Array, dtype: Any = None, **layout: Any) -> Array:
    del layout
    return x.astype(_type(dtype, x.dtype))


def _same(x: Array, *args: Any, **layout: Any) -> Array:
    del args, layout
    return x


def _zeros_like(x: Array, dtype: Any = None, **layout: Any) -> Array:
    del layout
    return jnp.zeros(x.shape, _type(dtype, x.dtype))


def _full_like(x: Array, value: float, dtype: Any = None, **layout: Any) -> Array:
    del layout
    return jnp.full(x.shape, value, _type(dtype, x.dtype))


def _ones_like(x: Array, dtype: Any = None, **layout: Any) -> Array:
    return _full_like(x, 1, dtype, **layout)


def _new_zeros(x: Array, size: Sequence[int], dtype: Any = None, **layout: Any) -> Array:
    del layout
    return jnp.zeros(tuple(size), _type(dtype, x.dtype))


def _zeros(size: Sequence[int], dtype: Any = None, **layout: Any) -> Array:
    del layout
    return jnp.zeros(tuple(size), _type(dtype, jnp.float32))


def _full(size: Sequence[int], value: float, dtype: Any = None, **layout: Any) -> Array:
    del layout
    kind = jnp.int32 if isinstance(value, int) else jnp.float32
    return jnp.full(tuple(size), value, _type(dtype, kind))


def _ones(size: Sequence[int], dtype: Any = None, **layout: Any) -> Array:
    del layout
    return jnp.ones(tuple(size), _type(dtype, jnp.float32))


def _arange(*bounds: float, dtype: Any = None, **layout: Any) -> Array:
    del layout
    whole = all(isinstance(bound, int) for bound in bounds)
    return jnp.arange(*bounds, dtype=_type(dtype, jnp.int32 if whole else jnp.float32))


def _scalar(value: float, dtype: Any = None, **layout: Any) -> Array:
    return _full((), value, dtype, **layout)


def _power(a: Any, b: Any) -> Array:
    return jnp.square(a) if isinstance(b, int | float) and b == 2 else jnp.power(a, b)


FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": _add,
        "sub": _sub,
        "rsub": _rsub,
        "mul": jnp.multiply,
        "div": _div,
        "floor_divide": jnp.floor_divide,
        "remainder": jnp.remainder,
        "pow": _power,
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "eq": jnp.equal,
        "ne": jnp.not_equal,
        "lt": jnp.less,
        "le": jnp.less_equal,
        "gt": jnp.greater,
        "ge": jnp.greater_equal,
        "bitwise_and": jnp.bitwise_and,
        "bitwise_or": jnp.bitwise_or,
        "bitwise_not": jnp.bitwise_not,
        "logical_and": jnp.logical_and,
        "logical_or": jnp.logical_or,
        "logical_not": jnp.logical_not,
        "neg": jnp.negative,
        "abs": jnp.abs,
        "square": jnp.square,
        "relu": jax.nn.relu,
        "exp": _wide(jnp.exp),
        "expm1": _wide(jnp.expm1),
        "log": _wide(jnp.log),
        "log1p": _wide(jnp.log1p),
        "sqrt": _wide(jnp.sqrt),
        "rsqrt": _wide(jax.lax.rsqrt),
        "reciprocal": _wide(jnp.reciprocal),
        "sigmoid": _wide(jax.nn.sigmoid),
        "silu": _wide(jax.nn.silu),
        "tanh": _wide(jnp.tanh),
        "sin": _wide(jnp.sin),
        "cos": _wide(jnp.cos),
        "softplus": _softplus,
        "gelu": _gelu,
        "log_sigmoid_forward": _log_sigmoid,
        "clamp": _clamp,
        "clamp_min": _clamp,
        "clamp_max": lambda x, bound: _clamp(x, None, bound),
        "masked_fill": _masked_fill,
        "where": _where,
        "sum": _sum,
        "mean": _mean,
        "amax": _amax,
        "linalg_vector_norm": _vector_norm,
        "norm": _vector_norm,
        "_softmax": _softmax,
        "native_layer_norm": _layer_norm,
        "_fused_rms_norm": _rms_norm,
        "rms_norm": lambda *given: _rms_norm(*given)[0],
        "native_group_norm": _group_norm,
        "mm": _matmul,
        "bmm": _matmul,
        "matmul": _matmul,
        "addmm": _addmm,
        "linear": _linear,
        "view": _view,
        "_unsafe_view": _view,
        "reshape": _view,
        "_reshape_alias": lambda x, size, stride: _view(x, size),
        "expand": _expand,
        "permute": lambda x, dims: jnp.transpose(x, tuple(dims)),
        "transpose": _transpose,
        "t": _t,
        "squeeze": _squeeze,
        "unsqueeze": jnp.expand_dims,
        "slice": _slice,
        "select": _select,
        "split": _split,
        "split_with_sizes": _split,
        "unbind": _unbind,
        "cat": _cat,
        "stack": _stack,
        "index": _index,
        "index_put": _index_put,
        "index_select": _index_select,
        "gather": _gather,
        "repeat": _repeat,
        "topk": _topk,
        "sort": _sort,
        "embedding": _embedding,
        "_to_copy": _cast,
        "clone": _same,
        "detach": _same,
        "alias": _same,
        "contiguous": _same,
        "empty_like": _zeros_like,
        "zeros_like": _zeros_like,
        "ones_like": _ones_like,
        "full_like": _full_like,
        "new_empty": _new_zeros,
        "new_zeros": _new_zeros,
        "empty": _zeros,
        "zeros": _zeros,
        "ones": _ones,
        "full": _full,
        "arange": _arange,
        "scalar_tensor": _scalar,
    }
)
"""By ATen's name, without the overload."""


def _copied(x: Array, source: Any, *args: Any) -> Array:
    del args
    return jnp.broadcast_to(jnp.asarray(source, x.dtype), x.shape)


IN_PLACE: Mapping[str, Callable[..., Array]] = MappingProxyType(
    {
        "add_": _add,
        "sub_": _sub,
        "mul_": jnp.multiply,
        "div_": _div,
        "copy_": _copied,
        "fill_": _copied,
        "zero_": jnp.zeros_like,
        "index_put_": _index_put,
        "masked_fill_": _masked_fill,
        "clamp_": _clamp,
    }
)
"""Functions that write their first argument in place and return its new value."""
VIEWS = frozenset(
    {
        *(
            "view",
            "_reshape_alias",
            "expand",
            "permute",
            "transpose",
            "t",
            "squeeze",
            "unsqueeze",
            "slice",
        ),
        *("select", "split", "split_with_sizes", "unbind", "detach", "alias"),
    }
)
"""Functions whose results share memory with their first argument in PyTorch."""
