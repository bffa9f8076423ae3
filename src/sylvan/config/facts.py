"""What resolving and checking know besides the configuration: machine, model, capabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sylvan.checkpoints.formats import WeightFormat
from sylvan.utils.machine import Machine

ON_JAX = ("jax", "tpu")
"""Kinds of devices that JAX computes on."""
KEEPS_CODES = ("cpu", "cuda", "rocm")
"""Kinds of devices with kernels for quantised matrices; others read them as plain numbers."""
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
}
"""Of a number, scales included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """A device that this process can use.

    Attributes:
        kind: As `device` in the configuration calls it.
        cores: CPU cores for kernels.
        total_bytes: Its memory.
        available_bytes: The part that is free now.
        fast_dtypes: Types it computes with at full speed.
        runners: Ways to execute a step on it, the preferred one first.
        exact_runners: Those of them whose bits do not depend on the rest of the batch.
        attention: Backends that suit it, the preferred one first; empty: in the order of `Facts`.
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
    """A checkpoint, before it is loaded.

    Attributes:
        name: Its directory, or the name of a built-in model.
        context_len: Longest sequence it was made for.
        vocab_size: Rows of its output.
        dtype: Type of its weights as stored.
        num_params: Numbers in all its tensors.
        num_linear_params: Those in matrices that quantisation applies to.
        kv_per_token: Numbers of keys and values of one token in all layers.
        work_per_token: Numbers in the largest intermediate results of one token.
        state_numbers: Numbers in the recurrent state of one request; 0 if all layers attend.
        head_dim: Numbers in one key head; 0: unknown.
        layer_windows: Newest tokens that each layer with keys and values sees, where config.json
            lists the kinds of layers; None: all. Empty: every layer sees everything.
        quantization: How its matrices are stored; None: as plain numbers.
        weights: In which kind of files they are; None: there are none.
        tasks: What it can be used for, what it was made for first.
        causal: Its tokens see only those before them.
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
    quantization: str | None = None
    weights: WeightFormat | None = None
    tasks: tuple[str, ...] = ("generate", "embed", "both")
    causal: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFacts:
    """What an attention backend can do.

    Attributes:
        devices: Where it runs.
        page_sizes: Tokens per page that it can use; None: any.
        page_size: The one it is fastest with.
        batch_invariant: Bits of a result do not depend on the rest of the batch.
        runners: Ways to execute a step that include it.
        kv_dtypes: Values of `cache.dtype` that it reads.
        dtypes: Types of weights that it computes with; None: any.
        max_head_dim: Largest head; None: any.
        module: Package that it needs; empty: none.
        extra: Extra of this package that installs it.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All facts.

    Attributes:
        devices: By kind.
        model: The model to serve.
        attention: Backends by name, the preferred ones first.
        draft: The draft model, if there is one.
        draft_reads_alike: Its ids stand for the same texts.
        adapter_rank: Largest rank of the adapters to load at start; 0: there are none.
        options: For each field whose values are names of modules, the names there are.
        quantizations: Methods that there are kernels for.
        absent: Kinds of devices that were looked for in vain -> why, and the way out.
        not_installed: Attention backends whose package is not there -> how to get it.
        missing: Path of a section or field whose feature does not exist yet -> the feature.
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

    def shared_by(self, count: int) -> Facts:
        """The facts for one of `count` servers that run on this machine at the same time."""
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
        runners: Ways to execute a step on it, the preferred one first.
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
