"""Recurrent mixers: the same bits however rows are cut and batched, and the states they leave."""

from __future__ import annotations

import itertools

import pytest
import torch

from sylvan.kernels.scan import DeltaInputs, SpaceInputs, Spans, delta_scan, short_conv, space_scan

ROWS, HEADS, DIM, STATES = 13, 4, 3, 5


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _conv(rows: slice, state: torch.Tensor, spans: Spans) -> torch.Tensor:
    x = _random(ROWS, HEADS)[rows]
    return short_conv(x, _random(HEADS, DIM), _random(HEADS), state, spans)


def _space(rows: slice, state: torch.Tensor, spans: Spans) -> torch.Tensor:
    inputs = SpaceInputs(
        _random(ROWS, HEADS, DIM)[rows],
        _random(ROWS, HEADS)[rows].abs(),
        -_random(HEADS).abs(),
        _random(ROWS, 2, STATES)[rows],
        _random(ROWS, 2, STATES)[rows] + 1,
        _random(HEADS),
    )
    return space_scan(inputs, state, spans)


def _delta(rows: slice, state: torch.Tensor, spans: Spans) -> torch.Tensor:
    inputs = DeltaInputs(
        _random(ROWS, 2, DIM)[rows],
        _random(ROWS, 2, DIM)[rows] + 1,
        _random(ROWS, HEADS, STATES)[rows],
        -_random(ROWS, HEADS)[rows].abs(),
        _random(ROWS, HEADS)[rows].sigmoid(),
    )
    return delta_scan(inputs, state, spans)


MIXERS = {
    "conv": (_conv, (DIM, HEADS)),
    "space": (_space, (HEADS, DIM, STATES)),
    "delta": (_delta, (HEADS, DIM, STATES)),
}


@pytest.fixture(params=MIXERS)
def mixer(request):
    run, shape = MIXERS[request.param]
    return run, torch.zeros(5, *shape)


@pytest.mark.parametrize("cuts", [(0, 6, 13), (0, 1, 2, 13), (0, 12, 13), tuple(range(14))])
def test_cuts_change_no_bit(mixer, cuts):
    run, state = mixer
    whole = run(slice(None), state, Spans((0, ROWS), (1,)))

    parts = [run(slice(a, b), state, Spans((0, b - a), (2,))) for a, b in itertools.pairwise(cuts)]

    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state[2], state[1])


def test_others_in_the_step_change_no_bit(mixer):
    run, state = mixer
    alone = run(slice(4, 10), state, Spans((0, 6), (1,)))

    batched = run(slice(None), state, Spans((0, 4, 10, ROWS), (2, 3, 4)))

    assert torch.equal(batched[4:10], alone)
    assert torch.equal(state[3], state[1])
    assert not state[0].any()


def test_saves_are_the_states_on_the_way(mixer):
    run, state = mixer
    run(slice(0, 5), state, Spans((0, 5), (1,)))

    run(slice(0, 9), state, Spans((0, 9), (2,), ((0, 5, 3), (0, 9, 4))))

    assert torch.equal(state[3], state[1])
    assert torch.equal(state[4], state[2])


def test_space_is_the_recurrence_of_its_definition():
    state = torch.zeros(2, HEADS, DIM, STATES)
    out = _space(slice(0, 2), state, Spans((0, 2), (1,)))

    x, dt = _random(ROWS, HEADS, DIM), _random(ROWS, HEADS).abs()
    b, c = _random(ROWS, 2, STATES), _random(ROWS, 2, STATES) + 1
    held = torch.zeros(HEADS, DIM, STATES)
    for t in range(2):
        for h in range(HEADS):
            keep = torch.exp(-dt[t, h] * _random(HEADS).abs()[h])
            held[h] = keep * held[h] + dt[t, h] * x[t, h][:, None] * b[t, h // 2][None]
            expected = held[h] @ c[t, h // 2] + _random(HEADS)[h] * x[t, h]
            assert torch.allclose(out[t, h], expected, atol=1e-6)
