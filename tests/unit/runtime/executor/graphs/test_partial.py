"""Programs that call PyTorch back for the modules that cannot be traced."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.graph import HostCall
from sylvan.kernels.native.library import LibraryMissing, load
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.program import ProgramRunner, host_calls, tracers
from sylvan.runtime.layers.build import Build
from sylvan.runtime.layers.embedding import Embedding
from sylvan.runtime.layers.linear import ColumnParallel, Linear
from sylvan.runtime.layers.mlp import GatedMLP
from sylvan.runtime.layers.norm import RMSNorm
from sylvan.runtime.pool.none import NoPool

try:
    LIBRARY = load()
except LibraryMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

LIMITS = BatchLimits(max_tokens=64, max_reqs=2, max_pages_per_req=4)
VOCAB = 50


class Odd(nn.Module):
    """Has an op that kernels lack, and a linear that they know."""

    def __init__(self, build: Build, dim: int) -> None:
        super().__init__()
        self.proj = Linear(build, dim, (dim,), bias=True)
        self.seen: list[tuple[int, int]] = []

    def forward(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        wide = torch.sin(self.proj(x_TD).float())
        self.seen.append((len(x_TD), batch.num_reqs))
        return (wide + batch.positions_T[:, None] / 8).to(x_TD.dtype)


class OddRows(nn.Module):
    """The same without the batch."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD - x_TD.flip(-1)


class Block(nn.Module):
    def __init__(self, build: Build, dim: int, mixer: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.norm = RMSNorm(build, dim, 1e-6), RMSNorm(build, dim, 1e-6)
        self.mixer, self.mlp = mixer, mlp

    def forward(self, x, residual, batch):
        h, stream = self.input_layernorm(x, residual)
        h, stream = self.norm(self.mixer(h, batch), stream)
        return self.mlp(h), stream


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype, dim: int, *, plain: bool = False) -> None:
        super().__init__()
        build = Build(dtype=dtype, length=64)
        gated = [GatedMLP(build, dim, 2 * dim, "silu", bias=False) for _ in range(3)]
        self.embed_tokens = Embedding(build, VOCAB, dim)
        mixers = [Plain(build, dim) if plain else Odd(build, dim) for _ in range(2)]
        last = gated[1] if plain else OddRows()
        self.layers = nn.ModuleList(
            Block(build, dim, mixer, mlp)
            for mixer, mlp in zip(mixers, (gated[0], last), strict=True)
        )
        self.norm, self.lm_head = RMSNorm(build, dim, 1e-6), ColumnParallel(build, dim, (VOCAB,))
        generator = torch.Generator().manual_seed(2)
        for parameter in self.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(1 + drawn / 8 if parameter.dim() == 1 else drawn / 4)

    def embed(self, batch):
        return self.embed_tokens(batch.input_ids_T)

    def forward(self, x, batch):
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return self.norm(x, residual)[0]

    def head(self, hidden):
        return self.lm_head(hidden, out_f32=True)


class Plain(nn.Module):
    def __init__(self, build: Build, dim: int) -> None:
        super().__init__()
        self.proj = Linear(build, dim, (dim,), bias=True)

    def forward(self, x, batch):
        return self.proj(x)


@pytest.fixture(autouse=True)
def calm_threads(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


def batch_of(tokens: int) -> ForwardBatch:
    batch = ForwardBatch(LIMITS, NoPool(8, 16), NullAttention())
    host = batch.host
    host.input_ids[:tokens] = np.arange(tokens) * 7 % VOCAB
    host.positions[:tokens] = np.arange(tokens)
    host.q_starts[:2], host.kv_lens[0], host.sample_rows[0] = (0, tokens), tokens, tokens - 1
    batch.ready(tokens, 1, 1)
    return batch


def runner_of(model: nn.Module, dtype: torch.dtype) -> ProgramRunner:
    return ProgramRunner(model, LIMITS, NoPool(8, 16), LIBRARY, dtype=dtype, threads=2)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("dim", [64, 40])  # rows with and without padding
@torch.inference_mode()
def test_modules_that_kernels_lack_are_called_between_native_parts(dtype, bound, dim):
    expected, model = Toy(dtype, dim), Toy(dtype, dim)
    batch = batch_of(9)
    hidden = expected(expected.embed(batch), batch)
    want = expected.head(ops.take_rows(hidden, batch.sample_rows))

    runner = runner_of(model, dtype)
    got = runner.run(batch).clone()

    assert runner.host_calls == "Odd, OddRows"
    assert torch.linalg.norm(got - want) <= bound * torch.linalg.norm(want)
    assert [layer.mixer.seen for layer in model.layers] == [[(9, 1)]] * 2
    calls = [op for op, _ in runner.profile(batch) if isinstance(op, HostCall)]
    assert len(calls) == 3
    costs = [cost for cost in runner.costs if cost.name.endswith("(PyTorch)")]
    assert [cost.name for cost in costs] == ["Odd (PyTorch)", "Odd (PyTorch)", "OddRows (PyTorch)"]
    assert costs[0].weight_bytes == (dim + 1) * dim * dtype.itemsize
    assert torch.equal(runner.run(batch), got)
    assert torch.equal(runner.logits(np.array([8], np.int32)), got)
    assert torch.equal(runner.head(runner.hidden(np.array([8]))), got)


@torch.inference_mode()
def test_steps_of_other_sizes_leave_nothing_behind():
    runner = runner_of(Toy(torch.float32, 40), torch.float32)
    alone = runner.run(batch_of(5)).clone()

    runner.run(batch_of(60))

    assert torch.equal(runner.run(batch_of(5)), alone)


def test_a_model_without_odd_modules_calls_nothing():
    assert runner_of(Toy(torch.float32, 64, plain=True), torch.float32).host_calls == ""


def test_parts_left_to_pytorch_are_reported_and_change_nothing():
    model = Toy(torch.float32, 64)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}

    left = host_calls(model, tracers(LIMITS, NoPool(8, 16), LIBRARY, torch.float32))

    assert left == "Odd, OddRows"
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert all("forward" not in vars(module) for module in model.modules())


def test_restless_threads_are_refused_before_a_weight_is_packed(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    model = Toy(torch.float32, 64)

    with pytest.raises(Unsupported, match="OMP_WAIT_POLICY=PASSIVE"):
        runner_of(model, torch.float32)

    assert all(p.untyped_storage().nbytes() for p in model.parameters())


def test_an_odd_op_outside_of_blocks_is_refused():
    model = Toy(torch.float32, 64)
    model.embed = lambda batch: torch.sin(model.embed_tokens(batch.input_ids_T))

    with pytest.raises(Unsupported, match="sin of a traced tensor"):
        runner_of(model, torch.float32)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda x: x + 1, "arithmetic"),
        (lambda x: x[:, 0], "arithmetic"),
        (lambda x: x.chunk(2, -1), "chunk of a traced tensor"),
        (torch.relu, "relu of a traced tensor"),
    ],
)
def test_a_traced_tensor_names_what_it_cannot_do(odd, words):
    model = SimpleNamespace(
        embed=lambda batch: odd(ops.embedding(batch.input_ids_T, torch.zeros(VOCAB, 64))),
        forward=lambda x, batch: x,
        head=lambda x: x,
    )

    with pytest.raises(Unsupported, match=words):
        runner_of(model, torch.float32)
