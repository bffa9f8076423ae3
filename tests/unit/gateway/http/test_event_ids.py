from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.gateway.http.event_ids import NumberedStream
from sylvan.protocol.errors import RequestError

EVENTS = [b"data: %d" % i for i in range(5)]
WHOLE = b"".join(event + b"\n\n" for event in EVENTS)


async def collect(stream, after=-1):
    return b"".join([part async for part in stream.read(after)])


def numbered(stream, first=0):
    name = stream.name.encode()
    parts = [b"id: %s-%d\n%s\n\n" % (name, i, e) for i, e in enumerate(EVENTS)]
    return b"".join(parts[first:])


@given(cuts=st.lists(st.integers(0, len(WHOLE)), max_size=6))
def test_ids_do_not_depend_on_how_events_are_cut(cuts):
    async def run():
        stream = NumberedStream("", 10_000)
        places = [0, *sorted(cuts), len(WHOLE)]
        for start, stop in itertools.pairwise(places):
            stream.add(WHOLE[start:stop])
        stream.end()
        assert await collect(stream) == numbered(stream)

    asyncio.run(run())


@pytest.mark.parametrize("after", range(-1, 4))
async def test_a_reader_continues_after_any_event(after):
    stream = NumberedStream("", 10_000)
    stream.add(WHOLE)
    stream.end()

    assert await collect(stream, after) == numbered(stream, after + 1)


async def test_a_reader_waits_for_what_comes():
    stream = NumberedStream("", 10_000)
    reading = asyncio.create_task(collect(stream))
    for event in EVENTS:
        await asyncio.sleep(0)
        stream.add(event + b"\n\n")
    stream.end()

    assert await reading == numbered(stream)


async def test_memory_is_bounded_and_what_is_gone_is_said_to_be():
    stream = NumberedStream("", 120)
    stream.add(WHOLE)

    with pytest.raises(RequestError, match="no longer stored") as caught:
        stream.check(0)
    assert caught.value.status == 410
    stream.check(3)


async def test_an_event_that_has_not_come_is_refused():
    stream = NumberedStream("", 10_000)
    stream.add(WHOLE)

    with pytest.raises(RequestError, match="no event with this number"):
        stream.check(5)
