"""Recurrent layers in programs, on every variant: what PyTorch computes, with the same bits however
rows are cut into steps and whoever shares a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import load
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.core.states import StateWork
from sylvan.runtime.executor.graphs.partial import SymbolicBatch
from sylvan.runtime.executor.graphs.step_states import StepStates
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.recurrent import (
    DeltaShape,
    GatedDelta,
    HalfSplitDelta,
    Mamba,
    Mamba2,
    Mamba2Shape,
    MambaShape,
    ShortConv,
    SplitDelta,
)
from sylvan.runtime.models import (
    kimi_linear,
    minimax,
    recurrent_gemma,
    rwkv,
    rwkv6,
    rwkv7,
    xlstm,
    zamba,
)
from sylvan.runtime.pool.none import NoPool
from sylvan.runtime.pool.states import TensorStates
from tests.support.native import DTYPES, random, variants

ROWS, SLOTS, DIM = 23, 9, 40
LIMITS = BatchLimits(max_tokens=64, max_reqs=8, max_pages_per_req=4)
Parts = tuple[tuple[tuple[int, ...], bool], ...]
SPACE = {"dim": DIM, "taps": 4}
SPACE2 = SPACE | {"eps": 1e-5, "bias": True}
DELTA = {"dim": DIM, "taps": 4, "eps": 1e-6}
EVEN = DeltaShape(key_heads=2, value_heads=4, key_dim=32, value_dim=64, **DELTA)
ODD = DeltaShape(key_heads=3, value_heads=3, key_dim=11, value_dim=37, **DELTA)
BY_KEY = DeltaShape(key_heads=3, value_heads=3, key_dim=22, value_dim=22, **DELTA)
HEADS = zamba.MultiHeadMambaShape(mamba=MambaShape(inner=66, states=9, rank=5, **SPACE), heads=3)
LIMITED = Mamba2Shape(
    heads=6, head_dim=16, states=32, groups=2, norm_groups=2, dt_limit=(0.01, 0.6), **SPACE2
)
RAW = {"num_hidden_layers": 1, "hidden_size": DIM, "vocab_size": 64, "num_attention_heads": 3}


def of_shape(mixer: Callable[..., nn.Module], shape: Any) -> Callable[[Build], Any]:
    return lambda build: (mixer(build, shape, 0), shape.parts)


def of_config(mixer: Callable[..., nn.Module], family: Any, **raw: Any) -> Callable[[Build], Any]:
    def make(build: Build) -> tuple[nn.Module, Parts]:
        config = family.parse(RAW | raw)
        return mixer(config, build, 0), tuple((part.shape, part.exact) for part in config.states)

    return make


RWKV7 = {
    "architectures": ["RWKV7ForCausalLM"],
    "head_dim": 20,
    "decay_low_rank_dim": 8,
    "a_low_rank_dim": 8,
    "v_low_rank_dim": 8,
    "gate_low_rank_dim": 16,
}
RWKV5 = {"architectures": ["Rwkv5ForCausalLM"], "head_size": 20}
RWKV6 = RWKV5 | {"architectures": ["Rwkv6ForCausalLM"]}
XLSTM = {"architectures": ["xLSTMForCausalLM"], "num_heads": 2}
MINIMAX = {
    "architectures": ["MiniMaxForCausalLM"],
    "layer_types": ["linear_attention"],
    "head_dim": 24,
    "num_local_experts": 2,
    "intermediate_size": 32,
}
GRIFFIN = {
    "architectures": ["RecurrentGemmaForCausalLM"],
    "block_types": ["recurrent"],
    "lru_width": 33,
    "head_dim": 16,
    "intermediate_size": 64,
    "num_key_value_heads": 1,
}
MIXERS: dict[str, Callable[[Build], tuple[nn.Module, Parts]]] = {
    "short convolution": lambda build: (
        ShortConv(build, DIM, 3, 0, bias=True),
        (((3, DIM), False),),
    ),
    "mamba 2": of_shape(Mamba2, LIMITED),
    "mamba 2, odd": of_shape(
        Mamba2, Mamba2Shape(heads=5, head_dim=7, states=5, groups=5, **SPACE2)
    ),
    "mamba": of_shape(Mamba, MambaShape(inner=64, states=16, rank=3, **SPACE)),
    "mamba, odd": of_shape(
        Mamba, MambaShape(inner=37, states=9, rank=5, norms="weighted", **SPACE)
    ),
    "mamba, norms without weights": of_shape(
        Mamba, MambaShape(inner=64, states=16, rank=4, norms="free", **SPACE)
    ),
    "delta": of_shape(GatedDelta, EVEN),
    "delta, odd": of_shape(GatedDelta, ODD),
    "delta, split by halves": of_shape(HalfSplitDelta, EVEN),
    "delta, split": of_shape(SplitDelta, EVEN),
    "delta by key": of_shape(kimi_linear.KimiDelta, BY_KEY),
    "mamba by heads": lambda build: (zamba.MultiHeadMamba(build, HEADS, 0), HEADS.mamba.parts),
    "lightning attention": of_config(minimax.LightningAttention, minimax, **MINIMAX),
    "gated linear recurrence": of_config(
        recurrent_gemma.RecurrentMixer, recurrent_gemma, **GRIFFIN
    ),
    "matrix memory": of_config(xlstm.MatrixMemory, xlstm, **XLSTM),
    "rwkv": of_config(rwkv.TimeMix, rwkv, architectures=["RwkvForCausalLM"]),
    "rwkv, channels": of_config(rwkv.ChannelMix, rwkv, architectures=["RwkvForCausalLM"]),
    "rwkv 5": of_config(rwkv6.DecayTimeMix, rwkv6, **RWKV5),
    "rwkv 6": of_config(rwkv6.DynamicTimeMix, rwkv6, **RWKV6),
    "rwkv 6, channels": of_config(rwkv6.ShiftedChannelMix, rwkv6, **RWKV6),
    "rwkv 7": of_config(rwkv7.MatrixTimeMix, rwkv7, **RWKV7),
    "rwkv 7, channels": of_config(rwkv7.SquaredChannelMix, rwkv7, **RWKV7),
}


@pytest.fixture(scope="module", params=variants())
def library(request):
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


@pytest.fixture(params=DTYPES, ids=["bf16", "fp32"])
def dtype(request):
    return request.param


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, TensorStates]:
    """A mixer with numbers of order 1, and states of which only slot 0 is known to be zero."""
    mixer, parts = MIXERS[name](Build(dtype=dtype, length=64))
    for number, (key, parameter) in enumerate(mixer.named_parameters()):
        drawn = random(*parameter.shape, dtype=torch.float32, seed=number)
        wide = parameter.dim() > 1 and not key.endswith("A_log")
        parameter.data.copy_(drawn * parameter.shape[-1] ** -0.5 if wide else drawn / 2)
    states = TensorStates(
        [(shape, torch.float32 if exact else dtype) for shape, exact in parts], SLOTS
    )
    for part in states.parts:
        part[1:] = torch.nan
    return mixer, states


@dataclass
class Step:
    """Requests of a step: their rows of the whole text, and the slots of their states."""

    rows: list[slice]
    slots: list[int]
    saves: tuple[tuple[int, int, int], ...] = ()

    @property
    def starts(self) -> list[int]:
        return np.cumsum([0, *(rows.stop - rows.start for rows in self.rows)]).tolist()

    @property
    def positions(self) -> np.ndarray:
        return np.concatenate([np.arange(r.start, r.stop) for r in self.rows]).astype(np.int32)


class InProgram:
    """A mixer traced on its own."""

    def __init__(self, name, dtype, library):
        mixer, self.states = made(name, dtype)
        limits = ProgramLimits(max_tokens=64, max_outputs=8)
        tracer = NativeTracer(dtype, limits, {}, library.constants, states=self.states.parts)
        self.x = tracer.input(DIM, tracer.dtype)
        with torch.inference_mode():
            self.out = mixer(self.x, SymbolicBatch(tracer))
        tracer.pin(self.out)
        self.program = Program(library, compile_graph(tracer.graph))
        self.arrays = StepStates(LIMITS)

    def run(self, x_TD: torch.Tensor, step: Step) -> torch.Tensor:
        count = step.starts[-1]
        starts, lens = np.array(step.starts, np.int32), np.zeros(8, np.int32)
        positions = step.positions
        run = StepRun(
            tokens=count,
            seqs=len(step.slots),
            row_start=starts.ctypes.data,
            kv_len=lens.ctypes.data,
            positions=positions.ctypes.data,
        )
        work = StateWork(np.array(step.slots, np.int32), (), step.saves)
        self.arrays.bind(run, work)
        self.program.write(self.x, torch.cat([x_TD[rows] for rows in step.rows]))
        self.program.run(run)
        return self.program.read(self.out, count).clone()


class InPyTorch:
    """The definition."""

    def __init__(self, name, dtype):
        self.mixer, self.states = made(name, dtype)

    @torch.inference_mode()
    def run(self, x_TD: torch.Tensor, step: Step) -> torch.Tensor:
        batch = ForwardBatch(LIMITS, NoPool(8, 16), NullAttention(), states=self.states)
        batch.host.q_starts[: len(step.starts)] = step.starts
        batch.host.positions[: step.starts[-1]] = step.positions
        batch.ready(step.starts[-1], len(step.slots), 1)
        batch.state_work = StateWork(np.array(step.slots, np.int32), (), step.saves)
        return self.mixer(torch.cat([x_TD[rows] for rows in step.rows]), batch)


def start(states: TensorStates, *slots: int) -> None:
    for slot in slots:
        states.copy(0, slot)


@pytest.mark.parametrize("name", MIXERS)
def test_it_computes_what_pytorch_does(name, dtype, library):
    x_TD = random(ROWS, DIM, dtype=dtype, seed=99)
    native, defined = InProgram(name, dtype, library), InPyTorch(name, dtype)
    step = Step([slice(0, ROWS), slice(3, 9)], [4, 7], ((0, 5, 2),))
    for one in (native, defined):
        start(one.states, 4, 7)

    got, want = native.run(x_TD, step), defined.run(x_TD, step)

    size = float(want.float().abs().max())
    bound = size * (2**-5 if dtype == torch.bfloat16 else 2e-5)
    assert float((got.float() - want.float()).abs().max()) < bound
    for mine, its in zip(native.states.parts, defined.states.parts, strict=True):
        kept = mine[[2, 4, 7]].float(), its[[2, 4, 7]].float()
        assert kept[0].isnan().equal(kept[1].isnan()), "the same parts are written"
        size = float(kept[1].nan_to_num().abs().max())
        bound = size * (2**-5 if dtype == torch.bfloat16 else 2e-5)
        assert float((kept[0] - kept[1]).nan_to_num().abs().max()) <= bound
        assert mine[[1, 3, 5, 6, 8]].isnan().all(), "slots of others are left alone"


@pytest.mark.parametrize("name", MIXERS)
def test_bits_do_not_depend_on_cuts_and_company(name, dtype, library):
    x_TD = random(ROWS, DIM, dtype=dtype, seed=98)
    whole, cut = InProgram(name, dtype, library), InProgram(name, dtype, library)
    start(whole.states, 4)
    start(cut.states, 1, 2, 3)

    want = whole.run(x_TD, Step([slice(0, ROWS)], [4]))
    first = cut.run(x_TD, Step([slice(5, 9), slice(0, 7)], [2, 3], ((1, 6, 5), (1, 7, 8))))
    rest = cut.run(x_TD, Step([slice(7, ROWS), slice(0, 4), slice(9, 10)], [3, 1, 2]))
    again = cut.run(x_TD, Step([slice(6, 9)], [5]))

    assert torch.equal(first[4:], want[:7])
    assert torch.equal(rest[: ROWS - 7], want[7:])
    assert torch.equal(again, want[6:9]), "from the state that was saved after six rows"
    for mine, others in zip(whole.states.parts, cut.states.parts, strict=True):
        assert torch.equal(mine[4].nan_to_num(7.0), others[3].nan_to_num(7.0))


@pytest.mark.parametrize("kind", DTYPES)
def test_columns_are_joined(kind, library):
    limits = ProgramLimits(max_tokens=8, max_outputs=1)
    tracer = NativeTracer(kind, limits, {}, library.constants, states=[torch.zeros(1)])
    a, b = (tracer.input(cols, tracer.dtype) for cols in (7, 40))
    out = tracer.recurrent.join_columns(a, b)
    tracer.pin(out)
    program = Program(library, compile_graph(tracer.graph))
    rows = [random(5, value.cols, dtype=kind, seed=value.cols) for value in (a, b)]

    for value, given in zip((a, b), rows, strict=True):
        program.write(value, given)
    program.run(StepRun(tokens=5))

    assert torch.equal(program.read(out, 5), torch.cat(rows, 1))


def test_layers_need_memory_for_states(library):
    mixer, _ = made("delta", torch.float32)
    limits = ProgramLimits(max_tokens=8, max_outputs=1)
    tracer = NativeTracer(torch.float32, limits, {}, library.constants)

    with pytest.raises(Unsupported, match="recurrent layers without memory for states"):
        mixer(tracer.input(DIM, "f32"), SymbolicBatch(tracer))


def test_memory_of_another_shape_is_refused(library):
    mixer, _ = made("delta", torch.float32)
    _, other = made("delta, odd", torch.float32)
    limits = ProgramLimits(max_tokens=8, max_outputs=1)
    tracer = NativeTracer(torch.float32, limits, {}, library.constants, states=other.parts)

    with pytest.raises(Unsupported, match=r"a state of torch\.float32"):
        mixer(tracer.input(DIM, "f32"), SymbolicBatch(tracer))
