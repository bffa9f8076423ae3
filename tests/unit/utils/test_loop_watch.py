from __future__ import annotations

import asyncio
import gc
import json
import signal
import subprocess
import sys
import threading
import time

from sylvan.utils.loop_watch import LoopStall, LoopWatch

LIMIT_S = 0.05
PATIENCE_S = 60


class Stalls:
    def __init__(self) -> None:
        self.all: list[LoopStall] = []
        self.some = threading.Event()

    def add(self, stall: LoopStall) -> None:
        self.all.append(stall)
        self.some.set()


def blocked_without_the_lock():
    time.sleep(0.5)


def blocked_with_the_lock():
    text = b"[" + b"[]," * 200_000 + b"0]"
    for _ in range(20):
        json.loads(text)


def watched(work):
    stalls = Stalls()

    async def run():
        watch = LoopWatch(LIMIT_S, stalls.add)
        watch.begin(asyncio.get_running_loop())
        await asyncio.sleep(0)
        work()
        for _ in range(int(PATIENCE_S / LIMIT_S)):
            await asyncio.sleep(LIMIT_S)
            if stalls.some.is_set():
                break
        watch.end()

    asyncio.run(run())
    return stalls.all


def test_the_function_that_blocks_the_loop_is_named():
    stall = watched(blocked_without_the_lock)[0]

    assert stall.function.endswith("test_loop_watch.blocked_without_the_lock")
    assert stall.seconds >= 0.4
    assert "blocked_without_the_lock" in str(stall)


def test_code_in_c_is_named_by_its_caller():
    collects = gc.isenabled()
    gc.disable()  # callbacks of others would run in there
    try:
        names = " ".join(map(str, watched(blocked_with_the_lock)))
    finally:
        if collects:
            gc.enable()

    assert "blocked_with_the_lock" in names or "json" in names


def test_a_suspension_is_no_stall():
    """Of all processes together: this thread did not run, either."""
    code = (
        "import asyncio, sys\n"
        "from sylvan.utils.loop_watch import LoopWatch\n"
        "async def run():\n"
        "    watch = LoopWatch(0.05, lambda stall: print(stall, flush=True))\n"
        "    watch.begin(asyncio.get_running_loop())\n"
        "    print('ready', flush=True)\n"
        "    while await asyncio.to_thread(sys.stdin.readline):\n"
        "        await asyncio.sleep(0.3)\n"
        "        print('ready', flush=True)\n"
        "asyncio.run(run())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    for _ in range(3):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.6)
        process.send_signal(signal.SIGCONT)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ready\n"
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0
    assert process.stdout.read() == ""
    process.stdout.close()


def test_a_loop_that_waits_delays_no_other():
    async def rest():
        watch = LoopWatch(LIMIT_S, stalls.add)
        watch.begin(asyncio.get_running_loop())
        watch._beat = lambda loop: None  # as if it were suspended: no beat comes any more
        await asyncio.sleep(10 * LIMIT_S)
        watch.end()

    stalls = Stalls()
    asyncio.run(rest())

    assert stalls.all == []
