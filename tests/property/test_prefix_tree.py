"""The approximate prefix tree against a plain table of what each worker was given."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sylvan.gateway.prefixes.tree import NODE_BYTES, PAGE, TAG_BYTES, PrefixTree

WORKERS = st.sampled_from(["a", "b", "c"])
PIECES = [bytes([letter]) * size for letter in b"xyz" for size in (1, PAGE - 1, PAGE, 40)]
KEYS = st.lists(st.sampled_from(PIECES), max_size=8).map(b"".join)


def common_pages(one: bytes, other: bytes) -> int:
    length = 0
    while one[length : length + PAGE] == other[length : length + PAGE] != b"":
        if len(one[length : length + PAGE]) < PAGE:
            break
        length += PAGE
    return length


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(1 << 30)
        self.given: dict[str, list[bytes]] = {}

    @rule(key=KEYS, worker=WORKERS)
    def insert(self, key, worker):
        self.tree.insert(self.tree.find(key), worker)
        self.given.setdefault(worker, []).append(key)

    @rule(worker=WORKERS)
    def drop(self, worker):
        self.tree.drop(worker)
        self.given.pop(worker, None)

    @precondition(lambda self: self.given)
    @rule(key=KEYS)
    def match(self, key):
        wanted = {
            worker: longest
            for worker, keys in self.given.items()
            if (longest := max(common_pages(key, k[: len(k) - len(k) % PAGE]) for k in keys))
        }
        assert dict(self.tree.matched(self.tree.find(key))) == wanted

    @invariant()
    def sound(self):
        self.tree.check()


TestModel = Model.TestCase


@given(
    keys=st.lists(st.tuples(KEYS, WORKERS), max_size=60),
    most=st.integers(0, 20_000),
    limit=st.integers(0, 400),
)
@settings(max_examples=60)
def test_bounds_hold_whatever_is_inserted(keys, most, limit):
    tree = PrefixTree(most)
    for key, worker in keys:
        tree.insert(tree.find(key), worker)
        tree.set_limit("a", limit)
        tree.check()
        assert tree.num_bytes <= max(most, NODE_BYTES + TAG_BYTES)
        assert tree.held_bytes("a") <= limit


@given(keys=st.lists(KEYS.filter(lambda key: len(key) >= PAGE), min_size=2, max_size=20))
def test_what_was_used_last_is_evicted_last(keys):
    tree = PrefixTree(1 << 30)
    for key in keys:
        tree.insert(tree.find(key), "a")
    last = keys[-1][: len(keys[-1]) - len(keys[-1]) % PAGE]

    tree.set_limit("a", len(last))

    tree.check()
    assert tree.matched(tree.find(last)).get("a", 0) > 0 or tree.held_bytes("a") == 0
