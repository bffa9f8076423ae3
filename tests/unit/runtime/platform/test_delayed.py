"""The fake device does what its users rely on: it is late, and notices who does not wait."""

from __future__ import annotations

import pytest
import torch

from tests.support.delayed import DelayedPlatform, EarlySyncError

WAITING = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "mask": lambda x: x[x > 0],
    "nonzero": torch.nonzero,
    "counts": lambda x: torch.bincount(x.long()),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "upload": lambda x: torch.tensor([1]),
}


@pytest.fixture
def platform():
    return DelayedPlatform()


def test_work_is_not_done_before_its_event_is_waited_for(platform):
    x, stream = torch.zeros(2), platform.stream()
    stream.run(lambda: x.add_(1))
    first = stream.event()
    stream.run(lambda: x.mul_(10))

    assert not first.done()
    assert x.tolist() == [0, 0]
    first.wait()
    assert first.done()
    assert x.tolist() == [1, 1]
    stream.event().wait()
    assert x.tolist() == [10, 10]


def test_memory_that_changes_too_early_is_read_changed(platform):
    source, target = torch.ones(2), torch.zeros(2)
    platform.stream().run(lambda: target.copy_(source))
    source.fill_(7)
    platform.stream().event().wait()

    assert target.tolist() == [7, 7]


@pytest.mark.parametrize("call", WAITING)
def test_work_that_waits_is_noticed(platform, call):
    x = torch.ones(2)
    platform.stream().run(lambda: WAITING[call](x) and None)

    with pytest.raises(EarlySyncError):
        platform.stream().event().wait()
    with platform.unsynced(), pytest.raises(EarlySyncError):
        WAITING[call](x)


def test_graphs_replay_into_the_same_output(platform):
    x, graph = torch.ones(2), platform.graph()
    out = graph.capture(lambda: x * 2)
    x.fill_(3)
    graph.replay()

    assert out.tolist() == [6, 6]
    assert (platform.captured, platform.replayed) == (1, 1)
