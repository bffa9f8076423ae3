"""Copies of KV pages within a pool, and between pool and host memory, against plain memory copies.

    python benchmarks/cache/bench_copies.py --shape M
    python benchmarks/cache/bench_copies.py --shape L --device cuda

`copy` measures the copies that prefix hits inside a page need before a step: pages per second in
one call for all copies, and with one small copy per side and layer, as without the kernel. `export`
and `import` are GB/s, with and without checksums; `memcpy` is one host copy of as many bytes,
`hashing` the rate of XXH3 and CRC-32. Measurements are interleaved within each round; numbers are
medians. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import xxhash

from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.platform.find import load_kinds, open_platform
from sylvan.runtime.pool.mha import KVShape, MHAPool
from sylvan.runtime.pool.transfers import DeviceTransfers

SHAPES = {  # layers, key heads, columns of a head: 0.5 B and 8 B
    "M": (24, 2, 64),
    "L": (32, 8, 128),
}
PAGE = 64
COPIES = (1, 8, 32)


def seconds(rounds: int, works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the medians of interleaved runs, after one warm-up run each."""
    for work in works.values():
        work()
    spent: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            spent[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in spent.items()}


def copies(pool: NativePool | MHAPool, rounds: int, wait: Callable[[], None]) -> dict[str, float]:
    """Return the pages copied per second in one call, by number of copies, and by single slices."""
    (memory,) = pool.groups
    order = np.random.default_rng(0).permutation(np.arange(1, memory.num_pages)).tolist()
    found: dict[str, float] = {}
    for count in COPIES:
        pairs = list(zip(order[:count], order[count : 2 * count], strict=True))
        works = {"copies": lambda pairs=pairs: (_copied(memory, pairs), wait())}
        if isinstance(pool, MHAPool):
            works["by slices"] = lambda pairs=pairs: (_sliced(pool, pairs), wait())
        for name, spent in seconds(rounds, works).items():
            found[f"{count} {name}, pages/s"] = count / spent
    return found


def _copied(memory: PageMemory, pairs: list[tuple[int, int]]) -> None:
    memory.copy_tokens([(source, target, PAGE) for source, target in pairs])


def _sliced(pool: MHAPool, pairs: list[tuple[int, int]]) -> None:
    for source, target in pairs:
        for layer in range(len(pool.layer_groups)):
            for side in pool.layer(layer):
                side[target] = side[source]


def transfers(memory: PageMemory, count: int, rounds: int) -> dict[str, float]:
    """Return GB/s of exports, imports and plain copies on the host."""
    pages = np.random.default_rng(1).permutation(np.arange(1, memory.num_pages))[:count]
    buffer, other = memory.host_buffer(count), memory.host_buffer(count)
    buffer[:] = other[:] = 1
    sums = memory.export(pages, buffer, checksum=True)
    sums.wait()
    works: dict[str, Callable[[], object]] = {
        "memcpy": lambda: ctypes.memmove(other.ctypes.data, buffer.ctypes.data, buffer.nbytes),
        "export": lambda: memory.export(pages, buffer).wait(),
        "export, checksums": lambda: memory.export(pages, buffer, checksum=True).wait(),
        "import": lambda: memory.import_(pages, buffer).wait(),
        "import, checksums": lambda: memory.import_(pages, buffer, checksums=sums.checksums).wait(),
        "hashing, xxh3": lambda: xxhash.xxh3_64_intdigest(buffer),
        "hashing, crc32": lambda: zlib.crc32(buffer),
    }
    spent = seconds(rounds, works)
    return {f"{name}, GB/s": buffer.nbytes / s / 1e9 for name, s in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pages", type=int, default=64, help="pages per transfer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    layers, heads, width = SHAPES[args.shape]
    shape = KVShape(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=width,
        num_pages=2 * max(args.pages, *COPIES) + 1,
        page_size=PAGE,
    )
    pools: dict[str, NativePool | MHAPool] = {}

    def wait() -> None:
        """Let a device finish; the CPU is never late."""
        if platform is not None:
            platform.stream().event().wait()

    platform = None
    if args.device == "cpu":
        pools["pages of step programs"] = NativePool(shape, torch.bfloat16)
        pools["tensors"] = MHAPool(shape, torch.bfloat16)
    else:
        platform = open_platform(load_kinds(())[args.device])
        through = DeviceTransfers(platform)
        pools["tensors"] = MHAPool(shape, torch.bfloat16, platform.device, through)
    results: dict[str, dict[str, float]] = {}
    for name, pool in pools.items():
        (memory,) = pool.groups
        everything = np.arange(memory.num_pages)
        random = np.random.default_rng(2).integers(0, 256, memory.page_bytes, np.uint8)
        buffer = memory.host_buffer(memory.num_pages)
        buffer.reshape(memory.num_pages, -1)[:] = random
        memory.import_(everything, buffer).wait()  # memory that was never written costs nothing
        print(f"{name}: {memory.page_bytes / 1e6:.2f} MB a page, {len(memory.regions(0))} regions")
        found = copies(pool, args.rounds, wait) | transfers(memory, args.pages, args.rounds)
        for what, number in found.items():
            print(f"  {what}: {number:,.1f}")
        results[name] = found
    if args.json:
        args.json.write_text(json.dumps({"shape": args.shape, "device": args.device, **results}))


if __name__ == "__main__":
    main()
