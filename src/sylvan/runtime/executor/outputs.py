"""Captures the outputs of layers while the model runs or is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle

from sylvan.kernels import ops
from sylvan.protocol.errors import ConfigError


def keep_outputs(
    model: Any, layers: Sequence[int], kept: dict[int, Any]
) -> Sequence[RemovableHandle]:
    """Store the outputs of some layers in `kept` during each run of `model`.

    An output is the residual stream after the layer, (T, D).

    Raises:
        ConfigError: the model does not have these layers.
    """
    if not layers:
        return ()
    blocks: Any = getattr(model, "layers", ())
    missing = [layer for layer in layers if layer >= len(blocks)]
    if missing:
        raise ConfigError(
            f"outputs of layers {missing} are required, but the model has {len(blocks)} layers"
        )
    return [blocks[layer].register_forward_hook(_keeper(layer, kept)) for layer in set(layers)]


@contextmanager
def layer_outputs(model: Any, layers: Sequence[int]) -> Iterator[Mapping[int, Any]]:
    """Context in which a run of `model` stores the outputs of these layers, by layer."""
    kept: dict[int, Any] = {}
    handles = keep_outputs(model, layers, kept)
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def keep_stream(model: Any, layer: int, kept: dict[int, Any]) -> RemovableHandle:
    """Make each run of `model` store the residual stream after a layer in `kept`.

    It is bit-identical to the input of the next layer, and float32 if the model's stream is.
    """

    def keep(module: Any, inputs: Any, output: Any) -> None:
        del module, inputs
        x_TD, residual_TD = output
        kept[layer] = x_TD if residual_TD is None else ops.add(residual_TD, x_TD)

    return model.layers[layer].register_forward_hook(keep)


def _keeper(layer: int, kept: dict[int, Any]) -> Callable[[Any, Any, Any], None]:
    def keep(module: Any, inputs: Any, output: Any) -> None:
        del module, inputs
        x_TD, residual_TD = output if isinstance(output, tuple) else (output, None)
        kept[layer] = x_TD if residual_TD is None else ops.add(x_TD, residual_TD)

    return keep
