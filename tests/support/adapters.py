"""Random LoRA adapters, written by `peft` or by hand, and the real scheduler and executor that
serve them.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel

from sylvan.config.tree import LoraConfig
from sylvan.kernels.api import Communicator
from sylvan.protocol.commands import LoadAdapter
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.lora.adapters import LoraAdapters
from sylvan.runtime.features.lora.build import lora_worker
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from sylvan.runtime.layers.mesh import Mesh
from sylvan.runtime.layers.placement import ExpertPlacement
from tests.parity.serving import Serving
from tests.support.ranks import build_ranks
from tests.support.stages import build_stages

MEMORY = 1 << 30


def write_adapter(
    model: PreTrainedModel, folder: Path, seed: int, **fields: Any
) -> PreTrainedModel:
    """Write an adapter with random numbers; return the model with it, which replaces `model`."""
    wanted = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**wanted | fields))
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    adapted.save_pretrained(folder)
    return adapted.base_model.model


class AdapterServing(Serving):
    """Serves the adapters in `folders`; `ids` are their IDs, `settings` those of lora.*.

    With `ranks` the model is divided among this many threads, in `ep` groups with whole experts,
    and `copies` redundant experts. With `stages` this many threads have some of the layers.
    """

    def __init__(
        self,
        model_dir: Path,
        folders: dict[str, Path],
        settings: dict[str, Any] | None = None,
        ranks: int = 1,
        ep: int = 1,
        copies: int = 0,
        stages: int = 1,
        **fields: Any,
    ) -> None:
        fields.setdefault("runner", "auto")
        given = {"memory": MEMORY, "max_rank": 64} | (settings or {})
        config = LoraConfig(**given)
        self.lora = lora = LoraAdapters(config)
        parts = ExecutorParts((*STANDARD_WORKERS, lora_worker(config)))
        build = partial(build_executor, parts=parts)
        if stages > 1:
            fields |= {"build": build_stages(stages, build=build), "overlap": True}
        elif ranks == 1:
            fields["workers"] = (*fields.pop("workers", ()), lora_worker(config))
        else:

            def mesh_of(rank: Communicator) -> Mesh:
                return Mesh(rank, ep, ExpertPlacement(ep, copies) if ep > 1 else None)

            fields["build"] = build_ranks(ranks, build, mesh_of=mesh_of)
        super().__init__(
            model_dir,
            capabilities=(*fields.pop("capabilities", ()), lora.control),
            **fields,
        )
        self.ids: dict[str | None, str | None] = {None: None}
        for name, folder in folders.items():
            self.load(name, folder)

    def load(self, name: str, folder: Path, *, pinned: bool = False) -> str:
        """Load an adapter while serving; return its ID."""
        command = LoadAdapter(name, str(folder), pinned)
        result = self.executor.control(command).wait()
        assert not result.error, result.error
        result = self.lora.loaded(command, result)
        assert not result.error, result.error
        self.ids[name] = result.body["id"]
        return result.body["id"]

    def ask(self, prompt: list[int], adapter: str | None = None, **fields: Any) -> str:
        """Add a request that uses an adapter, given by its name."""
        return self.add(prompt, lora=self.ids[adapter], **fields)


def write_random_adapter(
    folder: Path, model_dir: Path, seed: int, *, of: str = ".layers.", **fields: Any
) -> Path:
    """Write an adapter for every linear layer of a checkpoint in Llama's shape, without
    transformers.

    `of` is a part of the names of these layers.
    """
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "base_model_name_or_path": str(model_dir),
    } | fields
    rng, rank = np.random.default_rng(seed), config["r"]
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if of in name and tensor.ndim == 2:
            outputs, inputs = tensor.shape
            for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                numbers = rng.normal(0, 0.2, shape).astype(np.float32)
                tensors[f"base_model.model.{module}.{part}.weight"] = numbers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
