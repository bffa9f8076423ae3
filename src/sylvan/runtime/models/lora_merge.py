"""Merges low-rank adapters into a checkpoint. Arithmetic is in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models import lora_experts
from sylvan.runtime.models.lora import Adapter, read_adapter
from sylvan.runtime.models.safetensors import Checkpoint
from sylvan.runtime.models.stored import StoredTensor, WeightFiles


class MergedWeights:
    """Implements `WeightFiles`: the tensors of a checkpoint with an adapter merged."""

    def __init__(self, base: WeightFiles, adapter: Adapter) -> None:
        """Find the matrix of each module.

        Raises:
            ConfigError: the adapter was made for another model; names the module.
        """
        self._base, self._adapter = base, adapter
        self._by_name = lora_experts.by_expert(adapter, base)
        self._modules = {_tensor_of(base, f"{name}.weight"): name for name in self._by_name}
        self._whole = {_tensor_of(base, name): name for name in adapter.whole}
        for tensor, module in self._modules.items():
            self._check_shape(tensor, module)
        for tensor, name in self._whole.items():
            wanted, found = base.tensors[tensor].shape, tuple(adapter.whole[name].shape)
            if wanted != found:
                raise ConfigError(f"the adapter's {name!r} is {found}, the model's is {wanted}")

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors with the checkpoint's names, types and shapes."""
        return self._base.tensors

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return self._base.num_bytes

    @property
    def num_changed(self) -> int:
        """Number of tensors that differ from the checkpoint's."""
        return len(self._modules) + len(self._whole)

    def tensor(self, name: str) -> torch.Tensor:
        """A merged tensor, in the checkpoint's type."""
        found = self._base.tensor(name)
        if name in self._whole:
            return self._adapter.whole[self._whole[name]].to(found.dtype)
        if name not in self._modules:
            return found
        module = self._by_name[self._modules[name]]
        plain = module.parts.get("base_layer", found).float()
        scale = self._adapter.config.scale(self._modules[name], module.rank)
        delta = module.product() * scale
        transposed = self._adapter.config.fan_in_fan_out and not module.is_embedding
        merged = plain + (delta.T if transposed else delta)
        if (length := module.parts.get("lora_magnitude_vector")) is not None:
            rows = merged.T if transposed else merged
            rows = rows * (length.float() / rows.norm(dim=1))[:, None]
            merged = rows.T if transposed else rows
        return merged.to(found.dtype).contiguous()

    def _check_shape(self, tensor: str, module: str) -> None:
        stored = self._base.tensors[tensor]
        delta = self._by_name[module].product().shape
        base = self._by_name[module].parts.get("base_layer")
        transposed = self._adapter.config.fan_in_fan_out
        shape = stored.shape[::-1] if transposed else stored.shape
        if not stored.dtype.is_floating_point:
            raise ConfigError(f"{tensor!r} is quantised; merge into the plain checkpoint")
        same = base is None or tuple(base.shape) == stored.shape
        if tuple(delta) not in (shape, stored.shape) or not same:
            raise ConfigError(
                f"the adapter changes {module!r} as a matrix of {list(delta)}, but the model's is "
                f"{list(stored.shape)}: it was made for another model"
            )


def open_merged(model_dir: Path, adapter_dir: Path) -> tuple[Adapter, MergedWeights]:
    """Read an adapter, and open the checkpoint with it merged.

    Raises:
        ConfigError: see `read_adapter` and `MergedWeights`.
    """
    adapter = read_adapter(adapter_dir)
    return adapter, MergedWeights(Checkpoint(model_dir), adapter)


def _tensor_of(base: WeightFiles, name: str) -> str:
    if name in base.tensors:
        return name
    short = name.removeprefix("model.")
    for candidate in (short, f"model.{name}"):
        if candidate in base.tensors:
            return candidate
    raise ConfigError(
        f"the adapter changes {name!r}, which the model does not have: it was made for another "
        "model, or the matrix is tied to another one"
    )
