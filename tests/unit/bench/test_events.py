from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.bench.events import MAX_EVENT_BYTES, Events

DATA = st.lists(st.dictionaries(st.text(max_size=5), st.integers()), max_size=6)


@given(DATA, st.lists(st.integers(1, 9), min_size=1), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_events_are_the_same_however_they_arrive(parts, sizes, end):
    whole = b": hello\n" + b"".join(b"data: " + json.dumps(p).encode() + end for p in parts)
    whole += b"data: [DONE]" + end
    events, found, at = Events(), [], 0
    while at < len(whole):
        size = sizes[at % len(sizes)]
        found += [json.loads(payload) for payload in events.feed(whole[at : at + size])]
        at += size

    assert found == parts


def test_an_event_without_end_is_not_kept_for_ever():
    events = Events()
    assert list(events.feed(b"x" * MAX_EVENT_BYTES)) == []
    with pytest.raises(ValueError, match="larger than"):
        list(events.feed(b"x"))
