"""A router's view: which blocks a serving engine says it holds."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from sylvan.runtime.cache.types import CacheKey
from sylvan.runtime.engine.engine import Engine
from sylvan.runtime.features.kv_events.blocks import chain
from tests.support.tiny import write_model

PAGE = 16
TIMEOUT_MS = 20_000


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def subscriber() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        made.setsockopt(zmq.LINGER, 0)
        yield made


def replay(subscriber: zmq.Socket[bytes]) -> list[dict[str, object]]:
    """All events so far."""
    events: list[dict[str, object]] = []
    subscriber.send_multipart((b"", bytes(8)))
    while (answer := subscriber.recv_multipart())[3]:
        events += msgspec.msgpack.decode(answer[3])[1]
    return events


def held(events: list[dict[str, object]]) -> set[int]:
    """The blocks that are cached after all `events`."""
    blocks: set[int] = set()
    for event in events:
        names = event.get("block_hashes", [])
        assert isinstance(names, list)
        if event["type"] == "BlockStored":
            assert not blocks & set(names), "stored twice"
            blocks |= set(names)
        elif event["type"] == "BlockRemoved":
            assert set(names) <= blocks, "removed but not held"
            blocks -= set(names)
        else:
            assert blocks == set()
    return blocks


def test_a_router_knows_what_is_cached(tmp_path: Path, subscriber: zmq.Socket[bytes]) -> None:
    address = free_address()
    subscriber.connect(address)
    with Engine(
        model_path=str(write_model(tmp_path)),
        load_format="dummy",
        device="cpu",
        threads=1,
        page_size=PAGE,
        max_total_tokens=2048,
        kv_events__endpoint="inproc://events",
        kv_events__replay_endpoint=address,
    ) as engine:
        prompt = list(range(65, 65 + 40))
        params = {"max_new_tokens": 30, "ignore_eos": True, "temperature": 0.0}
        reply = engine.generate(input_ids=prompt, sampling_params=params)
        other = engine.generate(input_ids=prompt[:33], sampling_params=params)
        after_two = held(replay(subscriber))
        for start in range(40):  # more than fits: some must go
            engine.generate(
                input_ids=[(start * 7 + i * i) % 250 for i in range(90)], sampling_params=params
            )
        full = held(replay(subscriber))
        assert engine.flush_cache()
        engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 1})
        events = replay(subscriber)

    # the last token of an answer was never computed
    one = chain(CacheKey(np.array([*prompt, *reply["output_ids"][:-1]], np.int32)), PAGE)
    two = chain(CacheKey(np.array([*prompt[:33], *other["output_ids"][:-1]], np.int32)), PAGE)
    assert after_two == {*one, *two}
    assert 0 < len(full) * PAGE <= 2048
    assert held(events) == set()
    assert any(event["type"] == "AllBlocksCleared" for event in events)
