from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from sylvan.runtime.storage.index import PageIndex
from tests.support.stores import name_of


def test_many_open_a_new_index_at_once(tmp_path):
    for number in range(20):
        barrier = Barrier(8)

        def opened(path=tmp_path / f"{number}.db", barrier=barrier):
            barrier.wait()
            PageIndex(path).close()

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(opened) for _ in range(8)]:
                done.result()


def test_whoever_looks_does_not_wait_for_whoever_writes(tmp_path):
    index, names = PageIndex(tmp_path / "db"), [name_of(number) for number in range(1200)]
    for number, name in enumerate(names):
        index.add(name, "space", 10, 100.0 + number)
    other = sqlite3.connect(tmp_path / "db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    # it would fail after ten seconds if it waited
    assert index.use([*names, name_of(9999)], 2000.0, None) == {*names}
    assert index.use([names[0]], 2100.0, 50.0) == set(), "not used for longer"
    assert index.use([names[0]], 2040.0, 50.0) == {names[0]}, "used, though it is not written yet"
    other.execute("ROLLBACK")
    other.close()

    assert [name for name, _ in index.oldest(None, 1)] == [names[1]]
    assert index.expired(2010.0) == names[1:]
    index.close()


def test_when_pages_were_used_is_there_for_the_next_process(tmp_path):
    index = PageIndex(tmp_path / "db")
    for number in range(3):
        index.add(name_of(number), "space", 10, 100.0)
    assert index.use([name_of(1)], 101.0, None) == {name_of(1)}
    assert index.use([name_of(2)], 102.0, None) == {name_of(2)}
    index.close()
    again = PageIndex(tmp_path / "db")
    assert {page.name: page.used_s for page in again.pages()} == {
        name_of(0): 100.0,
        name_of(1): 101.0,
        name_of(2): 102.0,
    }
    again.close()
