"""Cores near the memory of a rank."""

from __future__ import annotations

import os
import threading

import pytest

from sylvan.utils.numa import bind_to_node, cores_of_rank, memory_nodes


def machine(root, *nodes: str):
    for number, cores in enumerate(nodes):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    return root


def test_nodes_are_read_in_their_order(tmp_path):
    root = machine(tmp_path, "0-3,8-11", *["4-7"] * 8, "12", "", "13,15")

    found = memory_nodes(root)

    assert found[0] == {0, 1, 2, 3, 8, 9, 10, 11}
    assert found[-2:] == [{12}, {13, 15}]
    assert len(found) == 11


def test_what_cannot_be_read_is_no_node(tmp_path):
    assert memory_nodes(tmp_path) == []
    assert memory_nodes(machine(tmp_path, "some", "0-1")) == [{0, 1}]


@pytest.mark.parametrize(
    ("ranks", "want"),
    [
        (2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (4, [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        (3, [{0, 1}, {2, 3}, {4, 5, 6, 7}]),
        (8, [{0, 1}, {0, 1}, {2, 3}, {2, 3}, {4, 5}, {4, 5}, {6, 7}, {6, 7}]),
    ],
)
def test_ranks_are_spread_over_the_nodes(ranks, want):
    nodes = [frozenset({2 * n, 2 * n + 1}) for n in range(4)]

    assert [cores_of_rank(nodes, frozenset(range(8)), r, ranks) for r in range(ranks)] == want


def test_only_cores_that_the_process_may_use_count():
    nodes = [frozenset(range(4)), frozenset(range(4, 8))]

    assert cores_of_rank(nodes, frozenset({1, 5, 6}), 1, 2) == {5, 6}
    assert cores_of_rank(nodes, frozenset({1, 2}), 1, 2) is None
    assert cores_of_rank(nodes, frozenset(range(8)), 0, 1) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity of threads here")
def test_a_thread_and_what_it_starts_stay_on_the_cores_of_the_rank(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    root = machine(tmp_path, str(cores[0]), ",".join(map(str, cores[1:])))
    seen = []

    def rank() -> None:
        seen.append(bind_to_node(1, 2, 1, root))
        child = threading.Thread(target=lambda: seen.append(frozenset(os.sched_getaffinity(0))))
        child.start()
        child.join()
        seen.append(bind_to_node(0, 2, len(cores), root))

    thread = threading.Thread(target=rank)
    thread.start()
    thread.join()

    assert seen == [set(cores[1:]), set(cores[1:]), None]
    assert sorted(os.sched_getaffinity(0)) == cores
