"""Runs a real tiny model through the device path, on the delayed platform or any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from sylvan.runtime.attention.dense import DenseAttention
from sylvan.runtime.core.forward import BatchLimits
from sylvan.runtime.executor.device.build import DevicePlan, build_device
from sylvan.runtime.executor.facts import LoadedModelInfo, facts_of
from sylvan.runtime.executor.local import DeviceExecutor
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.executor.pools import cache_groups
from sylvan.runtime.features.prompt_logprobs.worker import PromptLogprobsWorker
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.checkpoint import load_weights
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.decoder import Decoder
from sylvan.runtime.models.holders import ParameterNames
from sylvan.runtime.models.live import LiveWeights
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.runtime.models.slots import slots
from sylvan.runtime.platform.api import Platform
from sylvan.runtime.pool.mha import KVShape, MHAPool
from tests.support.delayed import DelayedPlatform


class OnDevice:
    """Replaces `build_executor`, and keeps its arguments and results."""

    def __init__(self, platform: Platform | None = None, *, graph: bool = True, **parts) -> None:
        self.platform = platform or DelayedPlatform()
        self.graph, self.parts = graph, parts
        self.report = None

    def __call__(self, path: Path, options: LocalOptions) -> tuple[DeviceExecutor, LoadedModelInfo]:
        before = self.platform.memory()
        config = load_config(path)
        facts = facts_of(config, path)
        build = Build(dtype=torch.float32, length=facts.context_len)
        model = family_of(config).model(config, build)
        load_weights(model, path)
        sizes = {
            "num_layers": config.num_hidden_layers,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "page_size": options.page_size,
        }
        one = KVShape(num_pages=1, **sizes)
        plan = DevicePlan(
            platform=self.platform,
            before=before,
            model=model,
            limits=BatchLimits(
                max_tokens=options.max_batch_tokens,
                max_reqs=options.max_running_reqs,
                max_samples=options.max_samples,
                max_pages_per_req=-(-(facts.context_len + 1) // options.page_size),
            ),
            context_len=facts.context_len,
            make_pool=lambda pages: MHAPool(KVShape(num_pages=pages, **sizes), torch.float32),
            kv_groups=lambda pages: cache_groups(config, KVShape(num_pages=pages, **sizes)),
            page_bytes=one.bytes_per_page(torch.float32),
            num_pages=options.num_pages,
            vocab_size=config.vocab_size,
            graph=self.graph,
            capabilities=(PromptLogprobsWorker(),),
            weights=_live(config, build, model),
            **{"attention": DenseAttention()} | self.parts,
        )
        executor, self.report = build_device(plan)
        return executor, facts


def _live(config: ModelConfig, build: Build, model: Decoder) -> LiveWeights:
    def skeleton() -> Decoder:
        return family_of(config).model(config, replace(build, device=torch.device("meta")))

    names = ParameterNames(model, slots(skeleton()))
    return LiveWeights(skeleton, names.holders(model, ()))
