"""The interface of quantised checkpoint formats, and helpers that readers share.

A format says which tensors store a matrix, and converts them to a `QuantisedWeight`. Sharding,
joining, stacking, kernels and updates work on that type only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from sylvan.kernels.matmul.codes import Code, middle_of, paired
from sylvan.kernels.matmul.weights import CodedWeight, QuantisedWeight
from sylvan.protocol.errors import ConfigError

Tensors = Callable[[str], torch.Tensor]
"""Returns a tensor of the checkpoint by its name."""


class StoredFormat(Protocol):
    """How the matrices of one checkpoint are stored, as far as config.json determines it."""

    @property
    def name(self) -> str:
        """Name for display: method, bits and groups."""
        ...

    @property
    def bits(self) -> int:
        """Minimum bits of a weight in memory."""
        ...

    @property
    def mixes(self) -> bool:
        """Whether some of the matrices joined in a parameter may be unquantised."""
        ...

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        """Names of the tensors that store the parameter `name`; just `name` if unquantised."""
        ...

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> QuantisedWeight:
        """Convert the `parts` of the matrix `name`, into new tensors.

        Raises:
            ConfigError: Sizes contradict each other, or scales are not finite; names the tensor.
        """
        ...

    def idle(self, name: str, tensor: Tensors) -> bool:
        """Whether the tensor `name` can be ignored."""
        ...


def unpacked(words: torch.Tensor, bits: int, dim: int, count: int | None = None) -> torch.Tensor:
    """Unpack numbers of a few bits from int32 words along `dim`, the lowest bits first.

    A number may begin in one word and end in the next. Returns uint8, of the shape of `words`
    except for `dim`.
    """
    words = words.transpose(dim, -1).contiguous().long() & 0xFFFFFFFF
    size = words.shape[-1] * 32 // bits if count is None else count
    starts = torch.arange(size) * bits
    place, shift = starts // 32, starts % 32
    found = words[..., place] >> shift
    if 32 % bits:
        following = (place + 1).clamp(max=words.shape[-1] - 1)
        found |= words[..., following] << (32 - shift)
    return (found & ((1 << bits) - 1)).to(torch.uint8).transpose(dim, -1)


def of_integers(
    levels: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
    *,
    group: int,
    order: torch.Tensor | None = None,
) -> CodedWeight:
    """Make a matrix of integers 0 .. 2^bits - 1 with zero points, or centred on their middle.

    Shapes: `levels` uint8 (N, K), `scale` (N, G), `zero` uint8 (N, G).
    """
    code: Code = "int4" if bits <= 4 else "int8"
    middle = int(middle_of(code))
    shift = middle - (1 << bits - 1)  # fewer bits use the middle of four
    if zero is not None and bool((zero == middle - shift).all()):
        zero = None
    if zero is None and shift:
        levels = levels + shift
    q = paired(levels) if code == "int4" else levels
    return CodedWeight(
        q.contiguous(),
        scale.contiguous(),
        code,
        group,
        None if zero is None else zero.contiguous(),
        order=order,
    )


def check_scales(name: str, scale: torch.Tensor) -> torch.Tensor:
    """Check that scales are finite floating-point numbers.

    Raises:
        ConfigError: They are not; names the tensor.
    """
    if not scale.is_floating_point():
        raise ConfigError(f"the scales {name!r} are {scale.dtype}, not floating-point numbers")
    if not scale.float().isfinite().all():
        raise ConfigError(f"the scales {name!r} are not finite (NaN or infinity)")
    return scale


def check_words(name: str, words: torch.Tensor) -> torch.Tensor:
    """Reject a tensor that is not a matrix of int32 words.

    Raises:
        ConfigError: names it.
    """
    if words.dtype != torch.int32 or words.dim() != 2 or not words.numel():
        raise ConfigError(
            f"{name!r} is {list(words.shape)} of {words.dtype}, not a matrix of int32"
        )
    return words


def check_index(name: str, of_input: torch.Tensor) -> torch.Tensor:
    """The group of each input, int64 (K,).

    Raises:
        ConfigError: They are not integers; names the tensor.
    """
    if of_input.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"{name!r} is of {of_input.dtype}, not of integers")
    return of_input.flatten().long()


def check_whole(name: str, found: torch.Tensor, count: int) -> list[int]:
    """Read settings that are stored as a tensor of integers.

    Raises:
        ConfigError: They are not `count` integers; names the tensor.
    """
    kind = found.dtype
    if kind.is_floating_point or kind.is_complex or kind == torch.bool or found.numel() != count:
        raise ConfigError(
            f"{name!r} is {list(found.shape)} of {kind}; expected {count} whole numbers"
        )
    return [int(n) for n in found.flatten().tolist()]


def number(settings: Mapping[str, Any], field: str, choices: Sequence[int]) -> int:
    """Read a field of quantization_config.

    Raises:
        ConfigError: It is none of the choices; names the field.
    """
    found: Any = settings.get(field)
    if isinstance(found, bool) or found not in choices:
        allowed = ", ".join(map(str, choices))
        raise ConfigError(
            f"config.json: quantization_config.{field} is {found!r}; there are kernels for "
            f"{allowed}"
        )
    return int(found)


def matches(target: str, path: str) -> bool:
    """Whether a target (`re:PATTERN`, the end of a path, `Linear`) matches a layer.

    Raises:
        ConfigError: The pattern is no regular expression.
    """
    if target.startswith("re:"):
        try:
            return re.match(target[3:], path) is not None
        except re.error as error:
            raise ConfigError(
                f"config.json: {target[3:]!r} is no regular expression: {error}"
            ) from None
    return target in ("Linear", path) or path.endswith("." + target)
