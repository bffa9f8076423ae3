"""Inputs and intermediate results of building an executor: the model before and after loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from sylvan.kernels.native.copies import WeightCopy
from sylvan.kernels.native.cost import OpCost
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.weight_file import PackedWeightFile
from sylvan.kernels.paged.pages import NIBBLES
from sylvan.kernels.registry import registry
from sylvan.kernels.scan import scans_of
from sylvan.protocol.commands import DiskTensors
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import AttentionBackend, BatchLimits, KVCachePool
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.core.states import StatePool
from sylvan.runtime.executor.control import Checkpoints
from sylvan.runtime.executor.early.memory import InheritedMemory
from sylvan.runtime.executor.experts import ExpertLayer
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.executor.runner import ModelRunner, OnHead
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.moe import expert_layers_of, expert_load
from sylvan.runtime.layers.recurrent import has_scans_only, state_shapes, use_scans
from sylvan.runtime.layers.stage import Stage
from sylvan.runtime.models.checkpoint import Progress
from sylvan.runtime.models.config import ModelConfig, StatePart
from sylvan.runtime.models.files import open_weights
from sylvan.runtime.models.formats import Formats, Multiplier, choose
from sylvan.runtime.models.holders import Holder, ParameterNames
from sylvan.runtime.models.kv_scales import read_kv_scales, use_kv_scales
from sylvan.runtime.models.live import LiveWeights
from sylvan.runtime.models.pooling import PoolingSpec
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.runtime.models.slots import slots
from sylvan.runtime.models.stages import cut, stage_config
from sylvan.runtime.platform.api import Platform
from sylvan.runtime.pool.mha import KVShape
from sylvan.runtime.pool.states import QueuedStates, TensorStates

_OF_NO_WEIGHT = ("raw", "dtype", "eos_ids", "bos_id")
"""Config fields that may differ between checkpoints of the same model."""


_LEVELS = {"int8": torch.int8, "int4": NIBBLES}
"""Number types of pages with a scale per token and head, by `cache.dtype`."""
_WIDE = {"float8_e4m3fn": "float8_e5m2", "float8_e4m3fnuz": "float8_e5m2fnuz"}
"""Maps float8 types with 4 exponent bits to the ones with 5 that a chip supports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSizes:
    """Memory for recurrent states.

    Attributes:
        parts: Shape and type of each part of a state, on this rank.
        slots: Slots for requests and cached prefixes.
        branches: Slots for states between the draft tokens of a step.
    """

    parts: Sequence[tuple[tuple[int, ...], torch.dtype]]
    slots: int
    branches: int

    def tensors(self, device: torch.device) -> TensorStates:
        """Allocate the memory."""
        return TensorStates(self.parts, self.slots, device, self.branches)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """Inputs for building a model, shared by all kinds of runners."""

    model_dir: Path
    config: ModelConfig
    options: LocalOptions
    build: Build
    limits: BatchLimits
    progress: Progress | None
    pooling: PoolingSpec | None = None
    platform: Platform | None = None
    hidden_layers: tuple[int, ...] = ()  # layers whose output capabilities read
    edits_inputs: bool = False  # whether a capability provides input embeddings
    adapt: Callable[[nn.Module], None] = lambda model: None  # lets capabilities change layers
    on_head: OnHead = lambda rows: None  # see `EagerRunner`
    loads: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    expert_layers: dict[int, ExpertLayer] = field(default_factory=dict[int, ExpertLayer])
    memory: InheritedMemory | None = None  # of the previous executor; None: there is none

    def model(self, *, deferred: bool = False) -> Any:
        """Build the model without weights; sets the counters that `loads` returns.

        `deferred`: see `Build`.
        """
        build = replace(self.build, deferred=True) if deferred else self.build
        model = family_of(self.config).model(self.config, build)
        self._scale_keys_and_values(model)
        model = cut(model, self.stage)
        self.loads.clear()
        self.loads.update(expert_load(model))
        self.expert_layers.clear()
        for layer, mixture in expert_layers_of(model).items():
            if (expert_ranks := mixture.experts.expert_ranks) is not None:
                self.expert_layers[layer] = ExpertLayer(mixture.load, expert_ranks, mixture.experts)
        return model

    def _scale_keys_and_values(self, model: Any) -> None:
        """Give the checkpoint's e4m3 scales to the layers, if pages are e4m3."""
        config, kind = self.config, self.options.load_format
        native = config.path == "native" and config.kv_layers and not config.latent
        if self.options.kv_dtype != "fp8_e4m3" or kind == "dummy" or not native:
            return
        heads = self.build.mesh.heads(config.num_attention_heads, config.num_key_value_heads).keys
        files = open_weights(self.model_dir, kind)
        scales = read_kv_scales(files, config, heads, self.kv_type)
        use_kv_scales(model, scales, self.build.device)

    def skeleton(self, *, whole: bool = False) -> nn.Module:
        """Build a model with the same parameters, without memory; `whole`: of all stages."""
        build = replace(self.build, device=torch.device("meta"))
        model = family_of(self.config).model(self.config, build)
        return model if whole else cut(model, self.stage)

    @property
    def stage(self) -> Stage:
        """The layers of the model that this stage holds."""
        return self.build.mesh.stage

    @property
    def paged_config(self) -> ModelConfig:
        """Layout of KV pages."""
        return stage_config(self.config, self.stage)

    def names(self, model: Any) -> ParameterNames:
        """Names of the parameters of `model`."""
        return ParameterNames(model, slots(self.skeleton()))

    def live(
        self,
        model: Any,
        names: ParameterNames,
        copies: Sequence[WeightCopy] = (),
        changed: Callable[[], None] = lambda: None,
    ) -> LiveWeights | str:
        """The weights of the running `model`, or the reason why they are not accessible.

        `changed` is called after weights have changed.
        """
        return self.live_in(names.holders(model, copies), changed)

    def live_in(
        self,
        holders: Mapping[str, Sequence[Holder]],
        changed: Callable[[], None] = lambda: None,
    ) -> LiveWeights | str:
        """As `live`, for weights stored by `holders`, by parameter."""
        kind = self.options.load_format
        if kind == "dummy":
            return LiveWeights(self.skeleton, holders, changed)
        sees = self.config.media is not None and self.edits_inputs
        encoder_files = open_weights(self.model_dir, kind) if sees else None
        live = LiveWeights(self.skeleton, holders, changed, encoder_files)
        if self.config.path == "transformers":  # its tensors may differ from the checkpoint's
            try:
                live.fits(open_weights(self.model_dir, kind))
            except ConfigError as why:
                return f"the weights of this model cannot be read or replaced while serving: {why}"
        return live

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of the model."""
        kind = self.options.load_format
        loaded = None if kind == "dummy" else DiskTensors(str(self.model_dir), kind)
        return Checkpoints(loaded, self._check_config, self.build.mesh.tp.size)

    def _check_config(self, model_dir: Path) -> None:
        """Reject a checkpoint whose config.json describes another model; accept one without it.

        Raises:
            ConfigError: names the field that differs.
        """
        if not (model_dir / "config.json").exists():
            return
        other = load_config(model_dir, headless=self.options.headless)
        for name in ModelConfig.__struct_fields__:
            mine, its = (getattr(config, name) for config in (self.config, other))
            if name not in _OF_NO_WEIGHT and mine != its:
                raise ConfigError(
                    f"config.json in {str(model_dir)!r} describes another model: {name} is "
                    f"{its}, the served model has {mine}"
                )

    @property
    def threads(self) -> int:
        """Threads of native kernels."""
        return self.options.threads or torch.get_num_threads()

    @property
    def kv_type(self) -> torch.dtype:
        """Type of keys and values in the pool."""
        if self.options.kv_dtype == "model":
            return self.build.dtype
        levels, platform = _LEVELS.get(self.options.kv_dtype), self.platform
        if levels is not None and (platform is None or not platform.facts.lowering):
            return levels
        wide = self.options.kv_dtype == "fp8_e5m2"
        if platform is None:
            return torch.float8_e5m2 if wide else torch.float8_e4m3fn
        name = platform.facts.float8_of(platform.chip)
        if name is None or levels is not None:
            raise ConfigError(
                f"cache.dtype={self.options.kv_dtype}: {platform.facts.name} ({platform.chip}) "
                "does not compute with such numbers; leave cache.dtype at model"
            )
        return getattr(torch, _WIDE[name] if wide else name)

    @property
    def scales_tokens(self) -> bool:
        """Whether each head of a token has a scale in its pages."""
        small = self.kv_type in _LEVELS.values()
        return small or (self.platform is None and self.kv_type.itemsize == 1)

    @property
    def formats(self) -> Formats:
        """Quantised formats of the matrices."""
        return choose(self.config, self.options.quantization, by=self.multiplier)

    @property
    def multiplier(self) -> Multiplier:
        """Backend of the kernels for quantised matrices."""
        if self.platform is None or self.platform.facts.lowering:
            return "cpu"  # step programs support all formats on any platform
        kernels = registry().usable("matmul.linear", self.build.device.type)
        return "triton" if any(k.backend == "triton" for k in kernels) else "none"

    @property
    def kv_shape(self) -> KVShape:
        """Shape of the KV pool."""
        config, latent = self.paged_config, self.config.latent
        heads = config.num_attention_heads, config.num_key_value_heads
        attends = config.kv_layers and not latent
        # groups with different requests share the pages; each has a padding page
        groups = self.build.mesh.attention_dp * self.options.data_groups
        pages = 1 - (1 - self.options.num_pages) // groups
        return KVShape(
            num_layers=config.kv_layers,
            num_kv_heads=self.build.mesh.heads(*heads).keys.size if attends else 1,
            head_dim=latent.kept if latent else config.head_dim,
            num_pages=pages,
            page_size=self.options.page_size,
            memory=self.memory.pages if self.memory else None,
        )

    @property
    def states(self) -> StateSizes | None:
        """Memory that recurrent states need; None if the model has none."""
        if not self.config.states:
            return None
        drafted = self.limits.max_sampled_rows - 1 if self.options.max_samples else 0
        return StateSizes(
            parts=[
                (part.shape, torch.float32 if part.exact else self.build.dtype)
                for part in self._state_parts
            ],
            slots=self.options.num_states or 2 * self.options.max_running_reqs + 1,
            branches=drafted + self.limits.max_paths,
        )

    @property
    def _state_parts(self) -> Sequence[StatePart]:
        """Recurrent states of this rank's shard of the layers."""
        whole = self.config.states
        if self.build.mesh.tp.size == 1 and self.stage.count == 1:
            return whole
        mine = state_shapes(self.skeleton())
        elsewhere = (0,)  # placeholders for other stages, so that all stages number parts alike
        return [
            StatePart(mine.get(number, elsewhere), part.exact) for number, part in enumerate(whole)
        ]


def suits_device(plan: ModelPlan) -> bool:
    """Whether steps can be queued without waiting for results.

    Recurrent states cannot be rolled back by one token, so with drafts each step must wait for the
    result of the one before.
    """
    config = plan.config
    if plan.pooling is not None or not config.causal or config.path == "transformers":
        return False
    return not config.states or (not plan.options.max_samples and has_scans_only(plan.skeleton()))


def use_device_scans(plan: ModelPlan, model: nn.Module) -> None:
    """Install the device's kernels in recurrent layers, if there are any."""
    if plan.config.states and (scans := scans_of(plan.build.device)) is not None:
        use_scans(model, scans)


def device_states(plan: ModelPlan) -> tuple[QueuedStates | None, bool]:
    """Memory for recurrent states on a device, and whether graphs can hold steps with them."""
    states = plan.states
    if states is None:
        return None, True
    return QueuedStates(states.tensors(plan.build.device)), scans_of(plan.build.device) is not None


class KeptStates(StatePool, Protocol):
    """A pool of recurrent states that can be moved like pages of one token."""

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        """Its tensors, if they are in host memory."""
        ...

    @property
    def pages(self) -> PageMemory:
        """The same memory by slots."""
        ...


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model that is ready to run, and what its steps need.

    `exact`: answers are bit-identical whatever is batched, cached or chunked. `weights` may be the
    reason why they are not accessible. `buffers`: scratch memory of steps. `program`: the ops of a
    step program, if there is one. `use`: statistics of its steps for the server's state. `states`:
    recurrent states, if the runner stores them itself. `kept`: the file of the packed weights.
    `weight_bytes`: memory of the matrices; 0: unknown.
    """

    name: str
    runner: ModelRunner
    pool: KVCachePool
    attention: AttentionBackend
    library: Library | None = None  # CPU kernels
    exact: bool = False
    weights: LiveWeights | str = "the weights of this model can be neither read nor updated"
    buffers: Sequence[torch.Tensor] = ()
    program: Sequence[OpCost] = ()
    use: Callable[[], Mapping[str, float]] | None = None
    states: KeptStates | None = None
    kept: PackedWeightFile | None = None
    weight_bytes: int = 0


def rounds_to_fp8(plan: ModelPlan) -> bool:
    """Whether inputs of FP8 matrices are rounded to e4m3 as well.

    Raises:
        ConfigError: the device has no FP8 products.
    """
    if not plan.options.fp8_activations:
        return False
    floats = None
    if plan.multiplier == "triton" and plan.platform is not None:
        floats = plan.platform.facts.float8_of(plan.platform.chip)
    if floats != "float8_e4m3fn":
        raise ConfigError(
            f"fp8_activations=true: {plan.options.device} has no kernels for 8-bit floats; "
            "leave it at false"
        )
    return True
