"""Native recurrent mixers on every variant: as their definitions say, and the same bits however
rows are cut into steps, batched and spread over threads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional as F

from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.library import load
from sylvan.kernels.scan import DeltaInputs, Scans, SpaceInputs, Spans, TorchScans
from sylvan.kernels.scan.native import NativeScans
from tests.support.native import DTYPES, random, variants

ROWS, SLOTS = 29, 8
EXACT = 3e-5  # of float32 sums over at most 29 rows of order 1, against float64


@pytest.fixture(scope="module", params=variants())
def library(request):
    found = load(request.param)
    found.dll.sylvan_threads(2)
    return found


@dataclass(frozen=True)
class Mixer:
    """A kind of mixer of some sizes. `state` is the shape of a request's."""

    state: tuple[int, ...]
    exact: bool  # whether states are float32

    def run(self, scans: Scans, rows: slice, state: torch.Tensor, spans: Spans) -> torch.Tensor:
        raise NotImplementedError

    def defined(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of all rows as one request, and its last state, in float64."""
        raise NotImplementedError


@dataclass(frozen=True)
class Conv(Mixer):
    channels: int = 1
    taps: int = 4
    silu: bool = False
    bias: bool = True
    dtype: torch.dtype = torch.float32

    def parts(self, dtype):
        x = random(ROWS, self.channels + 5, dtype=dtype, seed=1)[:, 3 : 3 + self.channels]
        weight = random(self.channels, self.taps, dtype=dtype, seed=2)
        return x, weight, random(self.channels, dtype=dtype, seed=3) if self.bias else None

    def run(self, scans, rows, state, spans):
        x, weight, bias = self.parts(state.dtype)
        return scans.conv(x[rows], weight, bias, state, spans, silu=self.silu)

    def defined(self, dtype):
        x, weight, bias = self.parts(dtype)
        seen = torch.cat((torch.zeros(self.taps - 1, self.channels), x)).double()
        out = F.conv1d(seen.T[None], weight.double()[:, None], groups=self.channels)[0].T
        out = out if bias is None else out + bias.double()
        return F.silu(out) if self.silu else out, seen[-self.taps :]


@dataclass(frozen=True)
class Space(Mixer):
    groups: int = 1
    by_state: bool = False

    def parts(self, dtype):
        heads, width, states = self.state
        wide = random(ROWS, heads * width + 7, dtype=dtype, seed=1)
        x = wide[:, 7:].unflatten(1, (heads, width))
        both = random(ROWS, 2 * self.groups * states, dtype=dtype, seed=2)
        b, c = (part.unflatten(1, (self.groups, states)) for part in both.chunk(2, 1))
        dt = random(ROWS, heads, dtype=torch.float32, seed=3).abs()
        decay = -random(heads, states if self.by_state else 1, dtype=torch.float32, seed=4).abs()
        decay = decay if self.by_state else decay[:, 0]
        return SpaceInputs(x, dt, decay, b, c, random(heads, dtype=dtype, seed=5))

    def run(self, scans, rows, state, spans):
        i = self.parts(self.rows_dtype)
        some = replace(
            i, x_THP=i.x_THP[rows], dt_TH=i.dt_TH[rows], b_TGN=i.b_TGN[rows], c_TGN=i.c_TGN[rows]
        )
        return scans.space(some, state, spans)

    rows_dtype: torch.dtype = torch.float32

    def defined(self, dtype):
        i, heads = self.parts(dtype), self.state[0]
        each = heads // self.groups
        held, out = torch.zeros(self.state, dtype=torch.float64), []
        decay = i.decay.double().view(heads, -1)
        for t in range(ROWS):
            dt = i.dt_TH[t].double()
            b, c = (part[t].double().repeat_interleave(each, 0) for part in (i.b_TGN, i.c_TGN))
            take = (dt[:, None] * i.x_THP[t].double())[..., None] * b[:, None]
            held = held * torch.exp(dt[:, None] * decay)[:, None] + take
            skipped = i.skip_H.double()[:, None] * i.x_THP[t].double()
            out.append((held * c[:, None]).sum(-1) + skipped)
        return torch.stack(out), held


@dataclass(frozen=True)
class Delta(Mixer):
    groups: int = 1
    by_key: bool = False
    rows_dtype: torch.dtype = torch.float32

    def parts(self, dtype):
        heads, keys, values = self.state
        sizes = [self.groups * keys, self.groups * keys, heads * values]
        q, k, v = random(ROWS, sum(sizes), dtype=dtype, seed=1).split(sizes, 1)
        q, k = (part.unflatten(1, (self.groups, keys)) for part in (q, k))
        decay = -random(ROWS, heads * keys, dtype=torch.float32, seed=2).abs() / 4
        decay = decay.unflatten(1, (heads, keys)) if self.by_key else decay[:, :heads]
        beta = random(ROWS, 2 * heads, dtype=dtype, seed=3).sigmoid()[:, ::2]
        return DeltaInputs(q, k, v.unflatten(1, (heads, values)), decay, beta)

    def run(self, scans, rows, state, spans):
        parts = self.parts(self.rows_dtype)
        some = {name: getattr(parts, name)[rows] for name in DeltaInputs.__slots__}
        return scans.delta(DeltaInputs(**some), state, spans)

    def defined(self, dtype):
        parts, (heads, keys, _) = self.parts(dtype), self.state
        q, k = (
            (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
                heads // self.groups, 1
            )
            for x in (parts.q_THK.double(), parts.k_THK.double())
        )
        held, out = torch.zeros(self.state, dtype=torch.float64), []
        for t in range(ROWS):
            held = held * parts.decay[t].double().exp().view(heads, -1, 1)
            error = parts.v_THV[t].double() - torch.einsum("hkv,hk->hv", held, k[t])
            error = error * parts.beta_TH[t].double()[:, None]
            held = held + torch.einsum("hk,hv->hkv", k[t], error)
            out.append(torch.einsum("hkv,hk->hv", held, q[t]) * keys**-0.5)
        return torch.stack(out), held


MIXERS = {
    "conv": Conv((4, 96), False, 96, 4),
    "conv, odd, silu": Conv((3, 77), False, 77, 3, silu=True, bias=False),
    "conv of one tap": Conv((1, 16), False, 16, 1),
    "mamba 2": Space((6, 16, 32), True, groups=2),
    "mamba 2, odd": Space((5, 7, 5), True, groups=5),
    "mamba": Space((70, 1, 16), True, by_state=True),
    "mamba, odd": Space((37, 1, 9), True, by_state=True),
    "delta": Delta((4, 32, 64), True, groups=2),
    "delta, odd": Delta((3, 11, 37), True, groups=3),
    "delta by key": Delta((4, 32, 64), True, groups=4, by_key=True),
    "delta by key, odd": Delta((3, 19, 37), True, groups=3, by_key=True),
}


@pytest.fixture(params=MIXERS)
def mixer(request):
    return MIXERS[request.param]


@pytest.fixture(params=DTYPES, ids=["bf16", "fp32"])
def dtype(request):
    return request.param


@dataclass(frozen=True)
class Bench:
    """A mixer of rows of a dtype, and its states, all but the first never written."""

    mixer: Mixer
    scans: Scans
    state: torch.Tensor

    def run(self, rows: slice, spans: Spans) -> torch.Tensor:
        return self.mixer.run(self.scans, rows, self.state, spans)

    def start(self, *slots: int) -> None:
        """Requests that have seen nothing."""
        self.state[list(slots)] = 0


@pytest.fixture
def bench(mixer, dtype, library) -> Bench:
    if not isinstance(mixer, Conv):
        mixer = replace(mixer, rows_dtype=dtype)
    state = torch.full(
        (SLOTS, *mixer.state), torch.nan, dtype=torch.float32 if mixer.exact else dtype
    )
    return Bench(mixer, NativeScans(library, dtype), state)


def test_it_is_as_defined(bench, dtype):
    bench.start(3)
    out = bench.run(slice(None), Spans((0, ROWS), (3,)))

    expected, state = bench.mixer.defined(dtype)
    rounding = 2.0**-8 if out.dtype == torch.bfloat16 else EXACT
    torch.testing.assert_close(out.double(), expected, rtol=2 * rounding, atol=rounding)
    torch.testing.assert_close(bench.state[3].double(), state, rtol=EXACT, atol=EXACT)
    assert bench.state[[0, 1, 2, 4, 5, 6, 7]].isnan().all(), "another slot was written"


def test_it_is_what_pytorch_computes(bench, dtype):
    spans = Spans((0, 9, 10, 10, ROWS), (3, 1, 5, 2), ((0, 9, 4), (3, 6, 7), (3, 2, 6)))
    bench.start(1, 2, 3, 5)
    torch_bench = replace(bench, scans=TorchScans(), state=bench.state.clone())

    out, expected = bench.run(slice(None), spans), torch_bench.run(slice(None), spans)

    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    rounding = 2.0**-7 if out.dtype == torch.bfloat16 else EXACT
    torch.testing.assert_close(out, expected, rtol=rounding, atol=rounding)
    torch.testing.assert_close(
        bench.state, torch_bench.state, rtol=EXACT, atol=EXACT, equal_nan=True
    )


@pytest.mark.parametrize("cuts", [(0, 6, ROWS), (0, 1, 2, 17, ROWS), tuple(range(ROWS + 1))])
def test_cuts_change_no_bit(bench, cuts):
    bench.start(1, 2)
    whole = bench.run(slice(None), Spans((0, ROWS), (1,)))

    parts = [bench.run(slice(a, b), Spans((0, b - a), (2,))) for a, b in itertools.pairwise(cuts)]

    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(bench.state[2], bench.state[1])


def test_company_and_threads_change_no_bit(bench, library):
    bench.start(1, 2, 3, 4)
    alone = bench.run(slice(4, 10), Spans((0, 6), (1,)))

    library.dll.sylvan_threads(3)
    batched = bench.run(slice(None), Spans((0, 4, 10, ROWS), (2, 3, 4)))
    library.dll.sylvan_threads(2)

    assert torch.equal(batched[4:10], alone)
    assert torch.equal(bench.state[3], bench.state[1])


def test_saves_are_the_states_on_the_way(bench):
    bench.start(1, 2)
    bench.run(slice(0, 5), Spans((0, 5), (1,)))

    bench.run(slice(0, 9), Spans((0, 9), (2,), ((0, 9, 4), (0, 5, 3), (0, 5, 7))))

    assert torch.equal(bench.state[3], bench.state[1])
    assert torch.equal(bench.state[7], bench.state[1])
    assert torch.equal(bench.state[4], bench.state[2])


def test_the_default_dtype_of_torch_means_nothing(bench):
    """A kernel writes float32 whatever a library loaded beside it has set."""
    spans, before = Spans((0, ROWS), (3,)), torch.get_default_dtype()
    bench.start(3)
    expected, state = bench.run(slice(None), spans), bench.state[3].clone()
    bench.start(3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        out = bench.run(slice(None), spans)
    finally:
        torch.set_default_dtype(before)

    assert out.dtype == expected.dtype
    assert torch.equal(out, expected)
    assert torch.equal(bench.state[3], state)


def test_sizes_without_room_are_refused(library):
    scans = NativeScans(library, torch.float32)
    wide = Space((1, 1, 2000), True)

    with pytest.raises(Unsupported, match="2000 numbers of state"):
        wide.run(scans, slice(0, 1), torch.zeros(2, *wide.state), Spans((0, 1), (1,)))
    with pytest.raises(Unsupported, match="float16"):
        NativeScans(library, torch.float16)
