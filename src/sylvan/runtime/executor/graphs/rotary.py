"""Moves the rotary embedding of transformers models into native attention.

A transformers model rotates queries and keys right before attention, by a function of its module.
If a trial run shows that only attention reads the rotated tensors, the layers get a copy of their
forward in which that function only records the angles. Every call checks that attention receives
the recorded tensors.

Shapes: B requests, L tokens of each, T rows, N heads, H columns of a head, R rotated columns.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from sylvan.runtime.models.skeleton import NO_CACHE, UNTRACEABLE, AttentionStep, RotaryCall, called

_NAME = "apply_rotary_pos_emb"
_TOKENS = 5
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def use_native_rotary(model: Any, step: AttentionStep, dtype: torch.dtype) -> bool:
    """Let attention rotate queries and keys; return False if the model stays unchanged.

    Args:
        model: A model without recurrent states that attends through `step`.
        step: Shared data of its attention layers.
        dtype: Type of the rows.
    """
    layers = [module for module in model.modules() if _is_rotary(module)]
    if not layers:
        return False
    expected = _tried(model, step)
    copies: dict[FunctionType, FunctionType] = {}
    for module in layers:
        forward = _written(module)
        if forward not in copies:
            copies[forward] = _copied(forward, step)
        module.forward = MethodType(copies[forward], module)
    found = _tried(model, step)
    if expected and found and found.rotated and _alike(expected, found, _BOUNDS[dtype]):
        return True
    for module in layers:
        del module.forward
    return False


def _is_rotary(module: nn.Module) -> bool:
    """Whether the module's forward calls the rotary function by its name."""
    forward = _written(module)
    return (
        isinstance(forward, FunctionType)
        and _NAME in forward.__code__.co_names
        and callable(forward.__globals__.get(_NAME))
        and "forward" not in vars(module)
    )


def _written(module: nn.Module) -> Any:
    """The forward of the module's class, without decorators such as those for renamed arguments."""
    return inspect.unwrap(type(module).forward)


def _copied(forward: FunctionType, step: AttentionStep) -> FunctionType:
    """A copy of the code in which the rotary function is replaced."""
    rotate = forward.__globals__[_NAME]

    def noted(
        q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, *rest: Any, **options: Any
    ) -> Any:
        plain = rest or options or step.batch is None
        table_TR = None if plain else _table(step, q, cos, sin)
        if table_TR is None:
            return rotate(q, k, cos, sin, *rest, **options)
        step.rotary = RotaryCall(q, k, table_TR)
        return q, k

    known = {**forward.__globals__, _NAME: noted}
    made = FunctionType(
        forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _table(step: AttentionStep, q: torch.Tensor, cos: Any, sin: Any) -> torch.Tensor | None:
    """Cosines, then sines, of each row, if both halves of a head rotate by the same angles."""
    kept = step.tables.get(id(cos))
    if kept is not None and kept[0] is cos and kept[1] is sin:
        return kept[2]
    table_TR = None
    if q.dim() == 4 and cos.shape == sin.shape == (q.shape[0], q.shape[2], cos.shape[-1]):
        half = cos.shape[-1] // 2
        firsts = [x[..., :half] for x in (cos, sin)]
        seconds = [x[..., half:] for x in (cos, sin)]
        if 0 < 2 * half <= q.shape[-1] and all(map(torch.equal, firsts, seconds)):
            table_TR = torch.cat(firsts, -1).flatten(0, 1).float().contiguous()
    step.tables[id(cos)] = cos, sin, table_TR
    return table_TR


@dataclass(slots=True)
class _Seen:
    """Records the inputs of attention; each query's result is the value of its own row."""

    given: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    rotated: int = 0

    def run(
        self, spec: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        self.given += [q.float(), k.float(), v.float()]
        return v.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)

    def run_rotated(
        self,
        spec: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Any,
        table_TR: torch.Tensor,
    ) -> torch.Tensor:
        self.rotated += 1
        return self.run(spec, rotated(q, table_TR), rotated(k, table_TR), v, batch)


def rotated(x_TNH: torch.Tensor, table_TR: torch.Tensor) -> torch.Tensor:
    """Rotate the first R columns of each head, in float32."""
    half = table_TR.shape[1] // 2
    cos, sin = table_TR[:, None].split(half, -1)
    a, b, rest = x_TNH.float().tensor_split((half, 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Replaces a batch in trials."""

    attention: _Seen
    positions_T: torch.Tensor


def _tried(model: Any, step: AttentionStep) -> _Seen | None:
    """Run the model on a few tokens; return the recorded inputs of attention, and the result."""
    seen, positions = _Seen(), torch.arange(7, 7 + _TOKENS)
    batch: Any = _Trial(seen, positions)
    step.begin(batch)
    ids = torch.arange(_TOKENS)[None]
    try:
        with torch.inference_mode():
            out = called(model)(input_ids=ids, position_ids=positions[None], **NO_CACHE)
    except UNTRACEABLE:
        return None
    finally:
        step.begin(None)
    seen.hidden = out.last_hidden_state.float()
    return seen


def _alike(one: _Seen, other: _Seen, bound: float) -> bool:
    pairs = zip([*one.given, one.hidden], [*other.given, other.hidden], strict=False)
    close = all((a - b).norm() <= bound * a.norm() for a, b in pairs)
    return close and len(one.given) == len(other.given)
