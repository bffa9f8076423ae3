"""Recurrent mixers against their definitions: outputs, states, and states saved on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch

from sylvan.kernels.scan import DeltaInputs, DeviceSpans, Scans, SpaceInputs, Spans, TorchScans
from sylvan.kernels.scan.triton_scan import TritonScans
from tests.support.chosen import more
from tests.support.tensors import home, ints, put, random, tolerance

SLOTS = 7
PROMPTS = Spans((0, 9, 10, 27), (2, 4, 1), ((0, 4, 5), (2, 1, 3), (2, 17, 6)))
DECODES = Spans((0, 1, 2), (3, 1))
DTYPES = [torch.float32, torch.float16, *more(torch.bfloat16)]


@dataclass(frozen=True)
class Mixer:
    """`parts`: inputs of T rows in a type. `state`: its shape, and whether it is float32."""

    state: tuple[int, ...]
    exact: bool
    parts: Callable[[int, torch.dtype], object]
    run: Callable[[Scans, object, torch.Tensor, Spans | DeviceSpans], torch.Tensor]


def conv(channels: int, taps: int, *, bias: bool, silu: bool) -> Mixer:
    def parts(rows: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
        x = random(rows, channels + 3, dtype=dtype, seed=1)[:, 3:]
        weight = random(channels, taps, dtype=dtype, seed=2)
        return [x, weight, random(channels, dtype=dtype, seed=3) if bias else None]

    def run(scans, given, state, spans) -> torch.Tensor:
        return scans.conv(*given, state, spans, silu=silu)

    return Mixer((taps, channels), False, parts, run)


def space(heads: int, width: int, states: int, groups: int, *, by_state: bool) -> Mixer:
    def parts(rows: int, dtype: torch.dtype) -> SpaceInputs:
        bc = random(rows, 2 * groups * states, dtype=dtype, seed=4)
        b, c = (part.unflatten(1, (groups, states)) for part in bc.chunk(2, 1))
        return SpaceInputs(
            random(rows, heads, width, dtype=dtype, seed=1),
            random(rows, heads, seed=2).abs(),
            -random(*((heads, states) if by_state else (heads,)), seed=3).abs(),
            b,
            c,
            random(heads, seed=6),
        )

    def run(scans, given, state, spans) -> torch.Tensor:
        return scans.space(given, state, spans)

    return Mixer((heads, width, states), True, parts, run)


def delta(groups: int, heads: int, keys: int, values: int, *, by_key: bool = False) -> Mixer:
    def parts(rows: int, dtype: torch.dtype) -> DeltaInputs:
        return DeltaInputs(
            random(rows, groups, keys, dtype=dtype, seed=1),
            random(rows, groups, keys, dtype=dtype, seed=2),
            random(rows, heads, values, dtype=dtype, seed=3),
            -random(*(rows, heads, keys)[: 2 + by_key], seed=4).abs(),
            random(rows, heads, dtype=dtype, seed=5).sigmoid(),
        )

    def run(scans, given, state, spans) -> torch.Tensor:
        return scans.delta(given, state, spans)

    return Mixer((heads, keys, values), True, parts, run)


MIXERS = {
    "conv": conv(70, 4, bias=True, silu=True),
    "short conv": conv(5, 3, bias=False, silu=False),
    "mamba": space(40, 1, 5, 1, by_state=True),
    "mamba 2": space(4, 6, 20, 2, by_state=False),
    "delta": delta(2, 4, 12, 20),
    "delta by key": delta(3, 3, 12, 20, by_key=True),
}


def moved(parts):
    """Inputs on the CPU, where references choose no kernel."""
    if isinstance(parts, list):
        return [None if part is None else home(part) for part in parts]
    return replace(parts, **{f.name: home(getattr(parts, f.name)) for f in fields(parts)})


def states_of(mixer: Mixer, dtype: torch.dtype) -> torch.Tensor:
    state = random(SLOTS, *mixer.state, dtype=torch.float32 if mixer.exact else dtype, seed=9)
    state[0] = 0
    return state


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    limit = tolerance(dtype, 2e-5, 4e-3)
    torch.testing.assert_close(home(got).float(), want.float(), rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spans", [PROMPTS, DECODES], ids=["prompts", "decodes"])
@pytest.mark.parametrize("name", MIXERS)
def test_outputs_and_states_are_those_of_the_definition(
    name: str, spans: Spans, dtype: torch.dtype
) -> None:
    mixer = MIXERS[name]
    parts, state = mixer.parts(spans.starts[-1], dtype), states_of(mixer, dtype)
    wanted_state = home(state).clone()
    want = mixer.run(TorchScans(), moved(parts), wanted_state, spans)

    got = mixer.run(TritonScans(), parts, state, spans)

    close(got, want, dtype)
    close(state, wanted_state, dtype)
    assert not state[0].any(), "the empty state was written"


@pytest.mark.parametrize("name", MIXERS)
def test_padding_writes_nothing(name: str) -> None:
    """As in a captured step of four rows that holds two requests."""
    mixer = MIXERS[name]
    parts, state = mixer.parts(4, torch.float32), states_of(mixer, torch.float32)
    before = state.clone()
    padded = DeviceSpans(ints(range(5)), ints([3, 1, -1, -1]))

    got = mixer.run(TritonScans(), parts, state, padded)

    wanted_state = home(before).clone()
    want = mixer.run(TorchScans(), moved(parts), wanted_state, padded)
    close(got[:2], want[:2], torch.float32)
    close(state, wanted_state, torch.float32)
    others = [0, 2, 4, 5, 6]
    assert torch.equal(state[others], before[others])


@pytest.mark.parametrize("name", MIXERS)
def test_cuts_change_no_bit(name: str) -> None:
    mixer, rows = MIXERS[name], 11
    parts, state = mixer.parts(rows, torch.float32), states_of(mixer, torch.float32)
    whole = mixer.run(TritonScans(), parts, state, Spans((0, rows), (2,)))
    again, found = states_of(mixer, torch.float32), []

    for start, stop in ((0, 1), (1, 6), (6, rows)):
        piece = cut(parts, start, stop)
        found.append(mixer.run(TritonScans(), piece, again, Spans((0, stop - start), (2,))))

    assert torch.equal(torch.cat(found), whole)
    assert torch.equal(again, state)


def cut(parts, start: int, stop: int):
    """Rows of the inputs that have rows."""
    if isinstance(parts, list):
        return [parts[0][start:stop], *parts[1:]]
    names = [f.name for f in fields(parts) if "_T" in f.name]
    names += ["decay"] if isinstance(parts, DeltaInputs) else []  # of heads or of keys
    return replace(parts, **{name: getattr(parts, name)[start:stop] for name in names})


def test_spans_go_to_the_device_and_back() -> None:
    there = DeviceSpans.of(PROMPTS, put(torch.empty(0)).device)

    assert there.on_host() == PROMPTS
    assert there.first_saves_R1 is not None
    assert there.first_saves_R1.tolist() == [0, 1, 1, 3]
