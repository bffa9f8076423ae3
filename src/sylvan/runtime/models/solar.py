"""Solar Pro: Llama with block skips, which mix in the residual stream of an earlier layer."""

from __future__ import annotations

from typing import Any

from sylvan.kernels import ops
from sylvan.kernels.api import X
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig, attention_bias, common_fields, make_config
from sylvan.runtime.models.decoder import Decoder, scaled

Raw = dict[str, Any]

_KEPT, _MIXED = ("bskcn_1", "bskcn_2"), ("bskcn_3", "bskcn_4")


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `SolarForCausalLM`; windows of training do not matter to it."""
    layers = raw.get("num_hidden_layers") or 0
    for name in (*_KEPT, *_MIXED):
        numbers = raw.get(name) or []
        if not isinstance(numbers, list) or not all(_is_layer(n, layers) for n in numbers):
            raise ConfigError(f"config.json: {name} must list layers, it is {numbers!r:.100}")
    shares = raw.get("bskcn_tv") or [0.9, 0.8]
    if not isinstance(shares, list) or len(shares) != 2:
        raise ConfigError(f"config.json: bskcn_tv must have two numbers, it is {shares!r:.100}")
    fields = attention_bias(raw) | {"mlp_bias": bool(raw.get("mlp_bias", False))}
    return make_config(common_fields(raw) | fields)


def _is_layer(number: Any, layers: int) -> bool:
    return isinstance(number, int) and 0 <= number < layers


class Solar(Decoder):
    """Some layers save their input; later layers mix a share of it into theirs."""

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__(config, build)
        raw = config.raw
        self._kept = [frozenset(raw.get(name) or ()) for name in _KEPT]
        self._mixed = [frozenset(raw.get(name) or ()) for name in _MIXED]
        self._share = float((raw.get("bskcn_tv") or [0.9, 0.8])[1])

    def forward(self, x_TD: X, batch: ForwardBatch) -> X:
        stream_TD: Any = None
        held: dict[int, Any] = {}
        for layer, block in enumerate(self.layers):
            if any(layer in layers for layers in (*self._kept, *self._mixed)):
                x_TD = x_TD if stream_TD is None else ops.add(stream_TD, x_TD)
                stream_TD = None
            for place, layers in enumerate(self._kept):
                if layer in layers:
                    held[place] = scaled(x_TD, self._share)
            for place, layers in enumerate(self._mixed):
                if layer in layers and place in held:
                    x_TD = ops.add(scaled(x_TD, 1 - self._share), held[place])
            x_TD, stream_TD = block(x_TD, stream_TD, batch)
        return self.norm(x_TD, stream_TD)[0]


MODEL = Solar
