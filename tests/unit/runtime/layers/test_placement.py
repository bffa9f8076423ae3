"""Placement of experts on groups of ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.placement import ExpertPlacement, balanced, read_placement


@st.composite
def wishes(draw):
    """Loads of experts, copies and groups that fit together."""
    groups = draw(st.integers(1, 6))
    count = draw(st.integers(1, 24))
    most = count * (groups - 1)
    fitting = [n for n in range(most + 1) if (count + n) % groups == 0]
    copies = draw(st.sampled_from(fitting)) if fitting else None
    loads = draw(st.lists(st.integers(0, 10_000), min_size=count, max_size=count))
    return loads, copies, groups


@given(wishes())
def test_every_expert_is_somewhere_and_groups_have_each_once(wish):
    loads, copies, groups = wish
    if copies is None:
        return
    placement = ExpertPlacement(groups, copies)
    for balance in (False, True):
        if balance:
            placement.balance({0: loads})
        slots = placement.of_layer(0, len(loads))
        assert {*slots.experts} == {*range(len(loads))}
        assert len(slots.experts) == len(loads) + copies == slots.per_group * groups
        for group in range(groups):
            own = slots.of_group(group)
            assert len({*own}) == len(own)
        table = slots.table(groups)
        for expert, places in enumerate(table):
            assert {slots.experts[slot] for slot in places} == {expert}
        assert {*table.flatten().tolist()} == {*range(len(slots.experts))}


def work(experts, loads, groups):
    """Rows of each group, those of copies shared out."""
    counts = np.bincount(experts)
    rows = np.array([loads[e] / counts[e] for e in experts])
    return rows.reshape(groups, -1).sum(1)


def test_busy_experts_are_copied_and_spread():
    loads = [900, 1, 1, 1, 800, 1, 1, 1]
    plain = balanced(loads, 0, 2)
    assert work(plain, loads, 2).max() < 910  # the two busy ones are apart

    copied = balanced(loads, 2, 2)
    assert work(copied, loads, 2).max() / work(copied, loads, 2).mean() < 1.01
    assert sorted(copied).count(0) == sorted(copied).count(4) == 2


@pytest.mark.parametrize("name", ["logical_count", "expert_load"])
def test_loads_are_read_from_a_file(tmp_path, name):
    path = tmp_path / "loads.json"
    path.write_text(json.dumps({name: {"layers.1.mlp": [9, 0, 0, 9]}}))
    placement = read_placement(path, 2, 0)
    first, second = (placement.of_layer(1, 4).of_group(g) for g in range(2))
    assert {0, 3} - {*first}
    assert {0, 3} - {*second}
    assert placement.of_layer(0, 4).experts == (0, 1, 2, 3)


def test_a_placement_is_read_from_a_file(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[3, 1, 2, 0]]}))
    assert read_placement(path, 2, 0).of_layer(0, 4).experts == (3, 1, 2, 0)
    with pytest.raises(ConfigError, match="layer 0 has 6 experts in 6 slots, and the file has 4"):
        read_placement(path, 2, 0).of_layer(0, 6)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[]", "expected an object"),
        ("{", "truncated"),
        ("{}", "expected one of physical_to_logical_map"),
        ('{"logical_count": {"mlp": [1]}}', "has no layer number"),
        ('{"physical_to_logical_map": [[0.5]]}', "Expected `int`"),
    ],
)
def test_a_file_that_says_neither_is_refused_by_name(tmp_path, content, why):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"parallel\.expert_placement=.*{why}"):
        read_placement(path, 2, 0)


def test_what_does_not_divide_is_refused_with_what_does():
    with pytest.raises(ConfigError, match=r"parallel\.ep=4: 6 experts .*redundant_experts=2 adds"):
        ExpertPlacement(4).of_layer(0, 6)
    with pytest.raises(ConfigError, match=r"redundant_experts=10: 2 groups can use at most 8"):
        ExpertPlacement(2, 10).of_layer(0, 8)
