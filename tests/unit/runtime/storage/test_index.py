from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from sylvan.runtime.storage.index import PageIndex


def test_many_open_a_new_index_at_once(tmp_path):
    for number in range(20):
        barrier = Barrier(8)

        def opened(path=tmp_path / f"{number}.db", barrier=barrier):
            barrier.wait()
            PageIndex(path).close()

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(opened) for _ in range(8)]:
                done.result()
