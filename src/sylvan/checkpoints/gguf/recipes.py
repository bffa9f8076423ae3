"""Quantisation mixes (such as `Q4_K_M`): the number type of each matrix of a GGUF file.

The rules follow llama.cpp's `llama_tensor_get_type`: value and down projections, which matter most,
get more bits in some layers, and so does the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sylvan.protocol.errors import ConfigError

PREFIX = "gguf:"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A quantisation mix.

    Attributes:
        file_type: `general.file_type` of such files.
        kind: Type of most matrices.
        head: Type of the head, also if tied to the embedding.
        values: Type of value projections in layers that get more bits.
        down: Type of down projections in these layers.
        early: Whether only the first eighth of the layers gets more bits.
    """

    file_type: int
    kind: str
    head: str
    values: str = ""
    down: str = ""
    early: bool = False

    def of(self, tensor: str, layer: int, layers: int, *, tied: bool) -> str:
        """The type of a matrix, by its name in the file."""
        part = tensor.removesuffix(".weight").rpartition(".")[2]
        if part == "output" or (part == "token_embd" and tied):
            return self.head
        eighth = layers // 8
        more = layer < eighth
        if not self.early:
            more = more or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        if part == "attn_v" and self.values and more:
            return self.values
        if part in ("ffn_down", "ffn_down_exps") and self.down and more:
            return self.down
        return self.kind


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "F32": Recipe(0, "F32", "F32"),
        "F16": Recipe(1, "F16", "F16"),
        "BF16": Recipe(32, "BF16", "BF16"),
        "Q8_0": Recipe(7, "Q8_0", "Q8_0"),
        "Q5_1": Recipe(9, "Q5_1", "Q6_K"),
        "Q5_0": Recipe(8, "Q5_0", "Q6_K"),
        "Q4_1": Recipe(3, "Q4_1", "Q6_K"),
        "Q4_0": Recipe(2, "Q4_0", "Q6_K"),
        "Q6_K": Recipe(18, "Q6_K", "Q6_K"),
        "Q5_K_M": Recipe(17, "Q5_K", "Q6_K", "Q6_K", "Q6_K"),
        "Q5_K_S": Recipe(16, "Q5_K", "Q6_K"),
        "Q4_K_M": Recipe(15, "Q4_K", "Q6_K", "Q6_K", "Q6_K"),
        "Q4_K_S": Recipe(14, "Q4_K", "Q6_K", "Q5_K", "Q5_K", early=True),
        "Q3_K_M": Recipe(12, "Q3_K", "Q6_K", "Q4_K", "Q4_K"),
        "Q2_K": Recipe(10, "Q2_K", "Q6_K", "Q3_K", "Q3_K"),
    }
)
_NARROW = MappingProxyType(
    {
        "Q2_K": "Q4_0",
        "Q3_K": "Q4_0",
        "Q4_K": "Q5_0",
        "Q5_K": "Q5_1",
        "Q6_K": "Q8_0",
    }
)
"""Substitutes for types with blocks of 256, for rows that are not multiples of 256."""
_SMALL, _LARGE = 32, 256


def recipe_of(name: str) -> Recipe:
    """The mix that `gguf:NAME` names.

    Raises:
        ConfigError: There is no mix of this name.
    """
    kind = name.removeprefix(PREFIX)
    found = RECIPES.get(kind.upper())
    if found is None:
        raise ConfigError(f"--quantization: {name!r} is not one of gguf:{'|'.join(RECIPES)}")
    return found


def fitting(kind: str, inputs: int) -> str:
    """The type, or one with smaller blocks if rows of `inputs` numbers require it."""
    if kind in _NARROW and inputs % _LARGE:
        kind = _NARROW[kind]
    return kind if kind in ("F32", "F16", "BF16") or inputs % _SMALL == 0 else "F16"
