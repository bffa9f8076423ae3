"""Channels between machines: lost peers are reported."""

from __future__ import annotations

import asyncio

import zmq

from sylvan.protocol.nodes import HeadAlive, NodeAlive, ToHead, ToNode
from sylvan.transport.hub import AsyncHub, AsyncHubClient

HOST = "127.0.0.1"


def test_a_message_to_a_peer_that_has_gone_is_not_sent():
    async def run() -> None:
        with zmq.Context() as context:
            hub: AsyncHub = AsyncHub(context, HOST, 0, ToHead)
            point: AsyncHubClient = AsyncHubClient(context, f"tcp://{HOST}:{hub.port}", ToNode)
            point.send(NodeAlive())
            peer, _ = await hub.receive()
            assert hub.send(peer, HeadAlive())
            assert await point.receive() == HeadAlive()

            point.close()
            while hub.send(peer, HeadAlive()):  # the connection ends a moment later
                await asyncio.sleep(0.01)
            assert not hub.send(b"nobody", HeadAlive())
            hub.close()

    asyncio.run(asyncio.wait_for(run(), 60))
