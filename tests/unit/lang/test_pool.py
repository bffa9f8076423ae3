from __future__ import annotations

import threading

import pytest

from sylvan.lang.pool import WorkerPool


def test_tasks_run_on_at_most_max_threads():
    pool = WorkerPool(max_threads=3)
    names, lock, done = set(), threading.Lock(), threading.Semaphore(0)

    def task():
        with lock:
            names.add(threading.get_ident())
        done.release()

    for _ in range(200):
        pool.submit(task)
    for _ in range(200):
        assert done.acquire(timeout=10)

    assert 1 <= len(names) <= 3
    assert pool.peak_threads <= 3


def test_blocked_tasks_get_threads_of_their_own_up_to_the_bound():
    pool = WorkerPool(max_threads=4)
    meet = threading.Barrier(4)
    done = threading.Semaphore(0)

    for _ in range(4):
        pool.submit(lambda: (meet.wait(10), done.release()))
    for _ in range(4):
        assert done.acquire(timeout=10)

    assert pool.peak_threads == 4


def test_idle_threads_end():
    pool = WorkerPool(max_threads=2, idle_s=0.01)
    threads = []
    done = threading.Event()
    pool.submit(lambda: (threads.append(threading.current_thread()), done.set()))
    assert done.wait(10)

    threads[0].join(10)

    assert pool.num_threads == 0
    again = threading.Event()
    pool.submit(again.set)
    assert again.wait(10)


def test_bound_must_be_positive():
    with pytest.raises(ValueError, match="max_threads"):
        WorkerPool(0)
