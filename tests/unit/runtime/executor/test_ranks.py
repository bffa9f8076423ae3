"""The first rank's executor, where other ranks have gone."""

from __future__ import annotations

import time

import pytest
import zmq

from sylvan.protocol.errors import RankLostError
from sylvan.runtime.core.wire import StepCodec
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.ranks import Close, FromRank, RankedExecutor, StepFailed, ToRank
from sylvan.transport.hub import Hub, HubClient, HubPeer

HOST = "127.0.0.1"
NAMES = ["one", "other"]


class Own:
    """The executor of the first rank."""

    caps = ExecutorCaps(max_batch_tokens=1, max_running_reqs=1)
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def send_on(peer: HubPeer) -> None:
    """Until that fails, at most for a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        peer.send(StepFailed(1))
        time.sleep(0.01)


def test_ranks_are_closed_without_those_that_have_gone():
    with zmq.Context() as context:
        hub: Hub = Hub(context, HOST, NAMES, FromRank)
        address = f"tcp://{HOST}:{hub.port}"
        gone, there = (HubClient(context, address, name, ToRank) for name in NAMES)
        assert hub.join(60) is None
        spokes = [HubPeer(hub, name) for name in NAMES]
        gone.close()
        with pytest.raises(RankLostError):  # the connection ends a moment later
            send_on(spokes[0])
        own = Own()

        RankedExecutor(own, spokes, StepCodec({}, {}), lambda: None).close()

        assert own.is_closed
        assert there.receive(60) == Close()
        there.close()
        hub.close()
