from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sylvan.protocol.names import epoch_of, internal_name, rid_of

RIDS = st.text(alphabet="ab.#0129\u00e9/", min_size=1, max_size=12)
COUNTS = st.integers(0, 30)
PARTS = st.tuples(RIDS, COUNTS, COUNTS, COUNTS)


@given(PARTS, PARTS)
def test_a_name_stands_for_one_sample_of_one_request(one: tuple, other: tuple) -> None:
    assert (internal_name(*one) == internal_name(*other)) == (one == other)


@given(PARTS)
def test_a_name_tells_rid_and_epoch_whatever_the_rid(parts: tuple) -> None:
    name = internal_name(*parts)
    assert (rid_of(name), epoch_of(name)) == (parts[0], parts[3])


def test_other_names_have_no_epoch() -> None:
    for name in ("", "abc", "abc.0", "abc.0#1", "abc.0#1.x", "abc.0#1.\u0663"):
        assert epoch_of(name) == 0
    assert rid_of("abc") == "abc"
