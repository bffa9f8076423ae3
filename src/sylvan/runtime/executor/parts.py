"""What an executor is made from: everything known of a model before it is loaded, and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sylvan.kernels.gpu.choice import triton_installed
from sylvan.kernels.native.copies import WeightCopy
from sylvan.kernels.native.cost import OpCost
from sylvan.kernels.native.library import Library
from sylvan.protocol.commands import DiskTensors
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import AttentionBackend, BatchLimits, KVCachePool
from sylvan.runtime.executor.control import Checkpoints
from sylvan.runtime.executor.experts import Mixture
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.executor.runner import ModelRunner, OnHead
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.moe import expert_load, mixtures
from sylvan.runtime.layers.recurrent import state_shapes
from sylvan.runtime.models.checkpoint import Progress
from sylvan.runtime.models.config import ModelConfig, StatePart
from sylvan.runtime.models.files import open_weights
from sylvan.runtime.models.formats import Formats, Multiplier, choose
from sylvan.runtime.models.holders import Holder, ParameterNames
from sylvan.runtime.models.live import LiveWeights
from sylvan.runtime.models.pooling import PoolingSpec
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.runtime.models.slots import slots
from sylvan.runtime.platform.api import Platform
from sylvan.runtime.pool.mha import NIBBLES, KVShape
from sylvan.runtime.pool.states import TensorStates

_OF_NO_WEIGHT = ("raw", "dtype", "eos_ids", "bos_id")
"""Fields of a config by which checkpoints of one model may differ."""


_LEVELS = {"int8": torch.int8, "int4": NIBBLES}
"""Of pages of step programs, by `cache.dtype`."""
_WIDE = {"float8_e4m3fn": "float8_e5m2", "float8_e4m3fnuz": "float8_e5m2fnuz"}
"""Types with five bits of exponent, by those with four that a chip has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """What both ways of running a model are made from."""

    model_dir: Path
    config: ModelConfig
    options: LocalOptions
    build: Build
    limits: BatchLimits
    progress: Progress | None
    pooling: PoolingSpec | None = None
    platform: Platform | None = None
    hidden_layers: tuple[int, ...] = ()  # whose output capabilities read
    edits_inputs: bool = False  # whether a capability gives inputs as vectors
    adapt: Callable[[nn.Module], None] = lambda model: None  # lets capabilities change layers
    on_head: OnHead = lambda rows: None  # see `EagerRunner`
    loads: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    spreads: dict[int, Mixture] = field(default_factory=dict[int, Mixture])

    def model(self, *, late: bool = False) -> Any:
        """A new model without contents; its counts are those that `loads` shows.

        `late`: see `Build`.
        """
        build = replace(self.build, late=True) if late else self.build
        model = family_of(self.config).model(self.config, build)
        self.loads.clear()
        self.loads.update(expert_load(model))
        self.spreads.clear()
        for layer, mixture in mixtures(model).items():
            if (spread := mixture.experts.spread) is not None:
                self.spreads[layer] = Mixture(mixture.load, spread)
        return model

    def skeleton(self) -> nn.Module:
        """A model of the same parameters without memory."""
        build = replace(self.build, device=torch.device("meta"))
        return family_of(self.config).model(self.config, build)

    def names(self, model: Any) -> ParameterNames:
        """Which parameter of `model` is which."""
        return ParameterNames(model, slots(self.skeleton()))

    def live(
        self,
        model: Any,
        names: ParameterNames,
        copies: Sequence[WeightCopy] = (),
        changed: Callable[[], None] = lambda: None,
    ) -> LiveWeights | str:
        """The weights of `model` as it is run now, or why they cannot be had.

        `changed` is called after contents have changed.
        """
        return self.live_in(names.holders(model, copies), changed)

    def live_in(
        self,
        holders: Mapping[str, Sequence[Holder]],
        changed: Callable[[], None] = lambda: None,
    ) -> LiveWeights | str:
        """The same of weights that `holders` keep, by parameter."""
        kind = self.options.load_format
        if kind == "dummy":
            return LiveWeights(self.skeleton, holders, changed)
        sees = self.config.media is not None and self.edits_inputs
        seeing = open_weights(self.model_dir, kind) if sees else None
        live = LiveWeights(self.skeleton, holders, changed, seeing)
        if self.config.path == "transformers":  # which may read other tensors than it has
            try:
                live.fits(open_weights(self.model_dir, kind))
            except ConfigError as why:
                return f"weights of this model cannot be read or replaced while it is served: {why}"
        return live

    @property
    def checkpoints(self) -> Checkpoints:
        """Those of the model."""
        kind = self.options.load_format
        loaded = None if kind == "dummy" else DiskTensors(str(self.model_dir), kind)
        return Checkpoints(loaded, self._check_config, self.build.mesh.tp.size)

    def _check_config(self, model_dir: Path) -> None:
        """Refuse a checkpoint whose config.json describes another model; one without is taken.

        Raises:
            ConfigError: it does; names what differs.
        """
        if not (model_dir / "config.json").exists():
            return
        other = load_config(model_dir, headless=self.options.headless)
        for name in ModelConfig.__struct_fields__:
            mine, its = (getattr(config, name) for config in (self.config, other))
            if name not in _OF_NO_WEIGHT and mine != its:
                raise ConfigError(
                    f"config.json in {str(model_dir)!r} describes another model: {name} is "
                    f"{its}, that of the model served is {mine}"
                )

    @property
    def threads(self) -> int:
        """Of native kernels."""
        return self.options.threads or torch.get_num_threads()

    @property
    def suits_device(self) -> bool:
        """Whether steps can be launched without waiting for them: plain generation."""
        config = self.config
        others = self.pooling is not None or bool(config.states) or not config.causal
        return not others and config.path != "transformers"

    @property
    def kv_type(self) -> torch.dtype:
        """Of keys and values in the pool."""
        if self.options.kv_dtype == "model":
            return self.build.dtype
        small = self.options.kv_dtype in _LEVELS
        wide = self.options.kv_dtype == "fp8_e5m2"
        if (platform := self.platform) is None:
            floats = torch.float8_e5m2 if wide else torch.float8_e4m3fn
            return _LEVELS.get(self.options.kv_dtype, floats)
        name = platform.facts.float8_of(platform.chip)
        if name is None or small:
            raise ConfigError(
                f"cache.dtype={self.options.kv_dtype}: {platform.facts.name} ({platform.chip}) "
                "does not compute with such numbers; leave cache.dtype at model"
            )
        return getattr(torch, _WIDE[name] if wide else name)

    @property
    def formats(self) -> Formats:
        """How matrices are quantised."""
        return choose(self.config, self.options.quantization, by=self.multiplier)

    @property
    def multiplier(self) -> Multiplier:
        """Whose kernels multiply by quantised matrices."""
        if self.platform is None or self.platform.facts.lowering:
            return "cpu"  # step programs hold all formats, whatever runs them
        on_gpu = self.build.device.type == "cuda" and triton_installed()
        return "triton" if on_gpu else "none"

    @property
    def kv_shape(self) -> KVShape:
        """What the pool holds."""
        config, latent = self.config, self.config.latent
        heads = config.num_attention_heads, config.num_key_value_heads
        attends = config.kv_layers and not latent
        return KVShape(
            num_layers=config.kv_layers,
            num_kv_heads=self.build.mesh.heads(*heads).keys.size if attends else 1,
            head_dim=latent.kept if latent else config.head_dim,
            num_pages=self.options.num_pages,
            page_size=self.options.page_size,
        )

    @property
    def states(self) -> TensorStates | None:
        """Memory for recurrent states, if the model has any."""
        if not self.config.states:
            return None
        parts = [
            (part.shape, torch.float32 if part.exact else self.build.dtype)
            for part in self._state_parts
        ]
        count = self.options.num_states or 2 * self.options.max_running_reqs + 1
        guesses = self.limits.most_samples - 1 if self.options.max_samples else 0
        guesses += self.limits.max_paths
        return TensorStates(parts, count, self.build.device, guesses)

    @property
    def _state_parts(self) -> Sequence[StatePart]:
        """The states of this rank's share of the layers."""
        whole = self.config.states
        if self.build.mesh.tp.size == 1:
            return whole
        mine = state_shapes(self.skeleton())
        return [StatePart(mine[number], part.exact) for number, part in enumerate(whole)]


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model that is ready to run, and what its steps need.

    `exact`: bits of an answer do not depend on what else is batched, cached or chunked. `weights`
    may be why they cannot be had. `buffers`: memory of which nothing outlives a step. `program`:
    its ops, where there is one. `use`: numbers of its steps that are shown with the server's state.
    """

    name: str
    runner: ModelRunner
    pool: KVCachePool
    attention: AttentionBackend
    library: Library | None = None  # of kernels that compute on the CPU
    exact: bool = False
    weights: LiveWeights | str = "the weights of this model can neither be read nor replaced"
    buffers: Sequence[torch.Tensor] = ()
    program: Sequence[OpCost] = ()
    use: Callable[[], Mapping[str, float]] | None = None
