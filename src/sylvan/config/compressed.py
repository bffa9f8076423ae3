"""KV layout of compressed attention (DeepSeek V4), read from config.json.

Every layer stores the key of each token, and reads a window of them. Some layers also store an
entry for every `rate` tokens. An entry is spread over the last of these tokens: each of them stores
`columns` of its numbers. They lie in one page, and the step that computes the last of them writes
them all, so pages are shared between requests as for other models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from sylvan.protocol.errors import ConfigError

MODEL_TYPE = "deepseek_v4"
SPARSE = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"

_WINDOW = "sliding_attention"
_BLOCK = 16  # most tokens over which an entry is spread; pages hold a multiple of them
_RATIOS: Mapping[int, str] = {0: _WINDOW, 4: SPARSE, 128: HEAVY}
_RATES: Mapping[str, int] = {SPARSE: 4, HEAVY: 128}
_LARGEST_RATE = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedLayer:
    """A layer with entries.

    Attributes:
        rate: Tokens of an entry.
        width: Columns of its key.
        index: Columns of the key by which rows select entries; 0: rows see all of them. Such
            entries also read the tokens of the entry before.
        block: Tokens over which an entry is spread.
        kv_layer: Layer of the pool, among those of entries.
        column: First column there.
    """

    rate: int
    width: int
    index: int
    block: int
    kv_layer: int
    column: int

    @property
    def columns(self) -> int:
        """Numbers per token."""
        return (self.width + self.index) // self.block

    @property
    def state(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes of the recurrent states: sums of the tokens after the last entry."""
        widths = (self.width, self.index) if self.index else (self.width,)
        return tuple((len(widths), 3, width) for width in widths)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedLayout:
    """All layers; None for one without entries.

    Attributes:
        head_dim: Columns of the key of a token.
        window: Tokens whose keys a row reads.
        layers: By number.
        kv_layers: Layers of the pool that hold entries; small ones share one.
        columns: Numbers per token in each of these.
        block: Pages hold a multiple of so many tokens.
    """

    head_dim: int
    window: int
    layers: tuple[CompressedLayer | None, ...]
    kv_layers: int
    columns: int
    block: int

    @property
    def entry_numbers(self) -> int:
        """Numbers per token of the entries of all layers."""
        return self.kv_layers * self.columns

    @property
    def numbers(self) -> int:
        """Numbers per token in all layers."""
        return len(self.layers) * self.head_dim + self.entry_numbers

    @property
    def state_numbers(self) -> int:
        """Numbers in the recurrent state of one request."""
        shapes = [shape for layer in self.layers if layer for shape in layer.state]
        return sum(map(math.prod, shapes))


def compressed_layout(config: Mapping[str, Any]) -> CompressedLayout:
    """Read the layout from config.json.

    Raises:
        ConfigError: a size is impossible; names it.
    """
    head_dim = _size(config, "head_dim", 512)
    kinds = _kinds(config)
    rates = {kind: _rate(config, kind) for kind in _RATES}
    index = {SPARSE: _size(config, "index_head_dim", 128), HEAVY: 0}
    blocks = {kind: math.gcd(rate, _BLOCK) for kind, rate in rates.items()}
    columns = dict[str, int]()
    for kind in _RATES:
        if head_dim % blocks[kind] or index[kind] % blocks[kind]:
            raise ConfigError(
                f"config.json: head_dim {head_dim} and index_head_dim must divide by "
                f"{blocks[kind]}, over which an entry of {rates[kind]} tokens is spread"
            )
        columns[kind] = (head_dim + index[kind]) // blocks[kind]
    used = [kind for kind in _RATES if kind in kinds]
    widest = max((columns[kind] for kind in used), default=0)
    layers: list[CompressedLayer | None] = [None] * len(kinds)
    first = 0
    for kind in used:
        each = widest // columns[kind]
        mine = [number for number, found in enumerate(kinds) if found == kind]
        for place, number in enumerate(mine):
            layers[number] = CompressedLayer(
                rate=rates[kind],
                width=head_dim,
                index=index[kind],
                block=blocks[kind],
                kv_layer=first + place // each,
                column=place % each * columns[kind],
            )
        first += -(-len(mine) // each)
    return CompressedLayout(
        head_dim=head_dim,
        window=_size(config, "sliding_window", 128),
        layers=tuple(layers),
        kv_layers=first,
        columns=widest,
        block=max((blocks[kind] for kind in used), default=1),
    )


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Kind of each layer: as transformers writes it, or as published (`compress_ratios`)."""
    count = _size(config, "num_hidden_layers")
    given, ratios = config.get("layer_types"), config.get("compress_ratios")
    if given is None and isinstance(ratios, list):
        numbers = cast("list[object]", ratios)
        given = [_RATIOS.get(n, "") if isinstance(n, int) else "" for n in numbers]
    if given is None:
        given = [SPARSE if i % 2 and i > 1 else HEAVY for i in range(count)]
    listed = cast("list[object]", given) if isinstance(given, list) else []
    kinds = [kind for kind in listed[:count] if isinstance(kind, str) and kind in _RATIOS.values()]
    if len(kinds) != count:
        raise ConfigError(
            f"config.json: layer_types must name one of {', '.join(_RATIOS.values())} for each of "
            f"{count} layers"
        )
    return kinds


def _rate(config: Mapping[str, Any], kind: str) -> int:
    old = "compress_rate_csa" if kind == SPARSE else "compress_rate_hca"
    given = config.get("compress_rates")
    rates = cast("dict[str, object]", given) if isinstance(given, dict) else {}
    rate = config.get(old)
    rate = rates.get(kind, _RATES[kind]) if rate is None else rate
    if not isinstance(rate, int) or not 1 <= rate <= _LARGEST_RATE:
        raise ConfigError(
            f"config.json: compress_rates of {kind} must be in 1..{_LARGEST_RATE}, it is {rate!r}"
        )
    return rate


def _size(config: Mapping[str, Any], name: str, usual: int | None = None) -> int:
    value = config.get(name)
    value = usual if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {name} must be a positive integer, it is {value!r}")
    return value
