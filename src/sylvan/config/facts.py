"""Information for resolving and checking a configuration: machine, model, capabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sylvan.checkpoints.formats import WeightFormat
from sylvan.utils.machine import Machine

ON_JAX = ("jax", "tpu")
"""Kinds of devices that JAX computes on."""
KEEPS_CODES = ("cpu", "cuda", "rocm")
"""Kinds of devices with kernels for quantised matrices; others read them as plain numbers."""
GGUF = "gguf"
"""Format of quantised matrices in a GGUF file."""
GGUF_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5.5,
    "Q5_0": 6.5,
    "Q5_1": 7.5,
    "Q8_0": 8.5,
    "Q2_K": 5.125,
    "Q3_K": 4.5625,
    "Q4_K": 4.625,
    "Q5_K": 6.625,
    "Q6_K": 6.5625,
    "IQ1_S": 5.0,
    "IQ1_M": 6.0,
    "IQ2_XXS": 5.0,
    "IQ2_XS": 6.0,
    "IQ2_S": 6.0,
    "IQ3_XXS": 5.0,
    "IQ3_S": 5.0,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.3125,
    "TQ1_0": 4.125,
    "TQ2_0": 4.125,
    "MXFP4": 4.5,
    "NVFP4": 6.0,
}
"""Bits of a number in loaded matrices of these types on a CPU, with scales."""
GGUF_DEVICE_BITS = GGUF_BITS | {
    "Q5_0": 8.5,
    "Q5_1": 9.5,
    "Q2_K": 8.0,
    "Q3_K": 6.0,
    "Q4_K": 6.0,
    "Q5_K": 10.0,
    "Q6_K": 10.0,
    "IQ4_XS": 5.0,
    "TQ1_0": 4.0625,
    "TQ2_0": 4.0625,
}
"""The same on other devices, where scales are expanded and 6-bit codes take 8 bits."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTISED_BITS = {
    "w8a8": 8.25,
    "int8": 8.25,
    "fp8": 8.25,
    "fp8-block": 8.25,
    "mxfp8": 8.5,
    "w4a8": 4.5,
    "int4": 4.5,
    "w4a16": 4.25,
    "mxfp4": 4.5,
    "nvfp4": 6.0,
    "nvfp4_online": 6.0,
}
"""Bits per number, including scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """A device that this process can use.

    Attributes:
        kind: Its name in the setting `device`.
        cores: CPU cores for kernels.
        total_bytes: Size of its memory.
        available_bytes: Memory that is free now.
        fast_dtypes: Types that it computes at full speed.
        runners: Runners that it supports, the preferred one first.
        exact_runners: Runners that are batch-invariant.
        attention: Suitable attention backends, the preferred one first; empty: in the order of
          `Facts`.
    """

    kind: str
    cores: int = 1
    total_bytes: int = 0
    available_bytes: int = 0
    fast_dtypes: frozenset[str] = frozenset({"float32"})
    runners: tuple[str, ...] = ("eager",)
    exact_runners: frozenset[str] = frozenset()
    attention: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """Properties of a checkpoint, known before it is loaded.

    Attributes:
        name: Its directory, or the name of a built-in model.
        context_len: Its maximum context length.
        vocab_size: Columns of its logits.
        dtype: Type of its weights as stored.
        num_params: Number of parameters.
        num_linear_params: Number of parameters in matrices that quantisation covers.
        kv_per_token: Numbers of keys and values per token in all layers.
        work_per_token: Numbers in the largest intermediate results per token.
        state_numbers: Numbers in the recurrent state of one request; 0 without recurrent layers.
        head_dim: Numbers in one key head; 0 if unknown.
        layer_windows: Window of each layer with keys and values, if config.json lists the kinds of
          layers; None: no window. Empty: all layers attend to everything.
        kv_entries: Numbers of `kv_per_token` that belong to no layer of these, and to no window:
          entries of compressed attention.
        quantization: Format of its matrices; None if they are not quantised.
        matrix_bits: Mean bits of a number in loaded matrices of the format "gguf", which mixes
          types, on a CPU; else 0.
        device_matrix_bits: The same on other devices.
        weights: Kind of its weight files; None if there are none.
        tasks: Supported tasks, its main one first.
        causal: Whether its attention is causal.
        num_layers: Number of its layers; 0: unknown.
    """

    name: str
    context_len: int
    vocab_size: int
    dtype: str
    num_params: int
    num_linear_params: int
    kv_per_token: int
    work_per_token: int
    state_numbers: int = 0
    head_dim: int = 0
    layer_windows: tuple[int | None, ...] = ()
    kv_entries: int = 0
    quantization: str | None = None
    matrix_bits: float = 0.0
    device_matrix_bits: float = 0.0
    weights: WeightFormat | None = None
    tasks: tuple[str, ...] = ("generate", "embed", "both")
    causal: bool = True
    num_layers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFacts:
    """Capabilities of an attention backend.

    Attributes:
        devices: Kinds of devices that it supports.
        page_sizes: Page sizes that it supports; None: any.
        page_size: Its fastest page size.
        batch_invariant: Whether its results do not depend on the batch.
        runners: Runners that support it.
        kv_dtypes: Values of `cache.dtype` that it supports.
        dtypes: Weight types that it supports; None: any.
        max_head_dim: Largest supported head; None: any.
        module: Python package that it needs; empty: none.
        extra: Extra of this package that installs it.
        install: How else to get it, in words.
    """

    devices: frozenset[str]
    page_sizes: frozenset[int] | None = None
    page_size: int = 16
    batch_invariant: bool = False
    runners: frozenset[str] = frozenset({"eager"})
    kv_dtypes: frozenset[str] = frozenset({"model"})
    dtypes: frozenset[str] | None = None
    max_head_dim: int | None = None
    module: str = ""
    extra: str = ""
    install: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All facts.

    Attributes:
        devices: Devices by kind.
        model: The model to serve.
        attention: Attention backends by name, the preferred ones first.
        draft: The draft model, if there is one.
        draft_reads_alike: Whether its token ids mean the same texts.
        adapter_rank: Largest rank of the adapters to load at start; 0 if there are none.
        options: Available names, for each field whose values are names of modules.
        quantizations: Methods that have kernels.
        absent: Unavailable kinds of devices -> the reason, and what to do.
        not_installed: Attention backends whose package is missing -> how to install it.
        load_cache: Default directory for packed weights; None if it cannot be used.
        missing: Path of a section or field whose feature does not exist -> the feature.
    """

    devices: Mapping[str, DeviceFacts]
    model: CheckpointInfo
    attention: Mapping[str, AttentionFacts]
    draft: CheckpointInfo | None = None
    draft_reads_alike: bool = True
    adapter_rank: int = 0
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    quantizations: frozenset[str] = frozenset()
    absent: Mapping[str, str] = field(default_factory=dict[str, str])
    not_installed: Mapping[str, str] = field(default_factory=dict[str, str])
    load_cache: str | None = None

    def shared_by(self, count: int) -> Facts:
        """The facts for one of `count` servers that share this machine."""
        cpu = self.devices.get("cpu")
        if cpu is None or count == 1:
            return self
        part = replace(
            cpu,
            cores=max(1, cpu.cores // count),
            total_bytes=cpu.total_bytes // count,
            available_bytes=cpu.available_bytes // count,
        )
        return replace(self, devices={**self.devices, "cpu": part})


def cpu_facts(machine: Machine, runners: tuple[str, ...] = ("eager",)) -> DeviceFacts:
    """The CPU of this machine as a device.

    Args:
        machine: The machine.
        runners: Runners that it supports, the preferred one first.
    """
    bf16 = {"avx512_bf16", "amx_bf16"} & machine.features
    return DeviceFacts(
        kind="cpu",
        cores=machine.cores,
        total_bytes=machine.total_bytes,
        available_bytes=machine.available_bytes,
        fast_dtypes=frozenset({"float32", "bfloat16"} if bf16 else {"float32"}),
        runners=runners,
        exact_runners=frozenset(runners) & {"program"},
    )
