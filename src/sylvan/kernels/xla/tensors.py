"""Runs PyTorch modules on JAX values, while JAX traces a step.

Modules without ops (recurrent mixers, gated attention) call PyTorch's functions. Inside
`TorchLowering` these calls are intercepted and become calls of `jax.numpy`
(`sylvan.kernels.xla.aten`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sylvan.kernels.api import Unsupported
from sylvan.kernels.xla.aten import FUNCTIONS, IN_PLACE, TORCH_TYPES, VIEWS

Array: TypeAlias = jax.Array
Leaf = Callable[[torch.Tensor], Array]
"""The JAX value of a tensor that exists before a step: a weight, or a table."""

_MAKE = "_make_wrapper_subclass"
"""PyTorch's constructor of tensors without memory."""


class JaxTensor(torch.Tensor):
    """A tensor with the shape and type of a JAX value, but no memory.

    Attributes:
        value: The numbers; functions that write in place replace it.
        has_views: Whether another tensor shares its memory in PyTorch.
    """

    value: Array
    has_views: bool

    @staticmethod
    def __new__(cls: type[JaxTensor], value: Array) -> JaxTensor:
        kind = TORCH_TYPES[jnp.dtype(value.dtype).name]
        made = getattr(torch.Tensor, _MAKE)(cls, value.shape, dtype=kind)
        made.value, made.has_views = value, False
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Reject calls outside of `TorchLowering`."""
        raise Unsupported(f"{func} of a JAX value outside of its module")


class TorchLowering(TorchDispatchMode):
    """While it is entered, PyTorch's functions compute with JAX.

    Args:
        leaf: Looks up tensors that are not JAX values yet.
    """

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self._leaf = leaf

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name in IN_PLACE:
            return self._write(name, args, kwargs or {})
        if name == "lift_fresh":  # a tensor made of Python numbers just now
            return JaxTensor(jnp.asarray(args[0].numpy()))
        if name not in FUNCTIONS:
            with self:
                found = func.decompose(*args, **(kwargs or {}))
            if found is NotImplemented:
                raise Unsupported(f"torch.{name} has no lowering to JAX")
            return found
        named = {key: self._plain(value) for key, value in (kwargs or {}).items()}
        found = _wrapped(FUNCTIONS[name](*self._plain(args), **named))
        if name in VIEWS:
            for part in (args[0], *(found if isinstance(found, list) else [found])):
                if isinstance(part, JaxTensor):
                    part.has_views = True
        return found

    def value(self, tensor: torch.Tensor) -> Array:
        """The JAX value of any tensor."""
        return tensor.value if isinstance(tensor, JaxTensor) else self._leaf(tensor)

    def _write(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JaxTensor:
        target = args[0]
        if not isinstance(target, JaxTensor) or target.has_views:
            raise Unsupported(f"torch.{name} of a weight or a view")
        rest = self._plain(args[1:])
        named = {key: self._plain(value) for key, value in kwargs.items()}
        made = IN_PLACE[name](target.value, *rest, **named)
        target.value = made.astype(target.value.dtype)
        return target

    def _plain(self, value: Any) -> Any:
        """Arguments with JAX values in place of tensors."""
        if isinstance(value, torch.Tensor):
            if not isinstance(value, JaxTensor) and not value.dim():
                return value.item()  # a number that PyTorch made a tensor of
            return self.value(value)
        if isinstance(value, list | tuple):
            return [self._plain(part) for part in value]
        return value


def _wrapped(found: Any) -> Any:
    if isinstance(found, list | tuple):
        return [_wrapped(part) for part in found]
    return JaxTensor(found)


class Leaves:
    """Weights and tables that modules read, numbered in order of first use.

    Attributes:
        tensors: By number.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def meet(self, tensor: torch.Tensor) -> Array:
        """Number a tensor while shapes are traced; gives zeros of its shape."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)  # keeps its id its own
        return jnp.zeros(tensor.shape, JAX_TYPES[tensor.dtype])

    def among(self, arrays: Sequence[Array]) -> Leaf:
        """Looks tensors up in `arrays`, which are in the order of `tensors`."""

        def find(tensor: torch.Tensor) -> Array:
            number = self._numbers.get(id(tensor))
            if number is None:
                raise Unsupported("a tensor that is created in each step")
            return arrays[number]

        return find


JAX_TYPES: Mapping[torch.dtype, Any] = MappingProxyType(
    {kind: jnp.dtype(name) for name, kind in TORCH_TYPES.items() if kind != torch.int64}
    | {torch.int64: jnp.dtype("int32"), torch.float64: jnp.dtype("float32")}
)
