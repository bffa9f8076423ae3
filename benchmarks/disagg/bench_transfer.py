"""Claim: KV moves between processes nearly as fast as memory is copied.

Repeatedly sends the KV of a prompt, in the shape of a model of 0.5 B parameters, from the pool of
one process to the pool of another. Measures the seconds from the request for pages until all of
them have arrived, for each transfer in turn, and plain copies of as many bytes between them. Goals:
`attach` (which `shm` and `auto` use on one machine) reaches at least 60 % of the copy rate, `tcp`
on loopback at least 40 %.

    python benchmarks/disagg/bench_transfer.py [--tokens 2048] [--rounds 15]
        [--transfers attach segment tcp nixl mooncake]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.features.disagg.mechanisms import TransferMechanisms, transfer_mechanisms
from sylvan.runtime.features.disagg.receiver import Receiver
from sylvan.runtime.features.disagg.sender import Sender
from sylvan.runtime.features.disagg.tcp import TcpNetwork
from sylvan.runtime.features.disagg.work import (
    Expose,
    JoinRoom,
    PagesRequested,
    Receive,
    Received,
    SendPages,
)
from sylvan.runtime.pool.mha import KVShape
from sylvan.runtime.storage.manifest import Manifest

HOST, PAGE = "127.0.0.1", 64
SHAPE = json.loads((Path(__file__).parents[1] / "half_billion.json").read_text())
TRANSFERS = ("attach", "segment", "tcp")


def memory(tokens: int) -> list[PageMemory]:
    """Allocate pages for this many tokens, and write them once so that they are resident."""
    heads = SHAPE["num_attention_heads"]
    shape = KVShape(
        num_pages=tokens // PAGE + 1,
        page_size=PAGE,
        num_kv_heads=SHAPE["num_key_value_heads"],
        head_dim=SHAPE["hidden_size"] // heads,
        num_layers=SHAPE["num_hidden_layers"],
    )
    pool = NativePool(shape, torch.bfloat16)
    for group in pool.groups:
        group.memory.fill_(7)
    return list(pool.groups)


def identity() -> Manifest:
    return Manifest(
        version="", weights="", tokenizer="", dtype="", quantization="", kv_dtype="",
        runner="", attention="", context_len=0, page_size=PAGE, groups=(),
    )  # fmt: skip


def how(transfer: str, pages: list[PageMemory]) -> TransferMechanisms:
    if transfer == "segment":
        return TransferMechanisms(shares=True)
    if transfer == "attach":
        return replace(transfer_mechanisms("auto", pages, HOST), needs_reader=True)
    return transfer_mechanisms(transfer, pages, HOST)


def prefill(args: argparse.Namespace, transfer: str) -> None:
    """Run the process that owns the KV: print its port, then send the requested pages."""
    pages = memory(args.tokens)
    sender = Sender(TcpNetwork(), pages, identity(), b"", how(transfer, pages))
    print(sender.listen(HOST, 0), flush=True)
    count = args.tokens // PAGE
    sender.begin(tuple(Expose(room, room, b"") for room in range(args.rounds + 2)))
    numbers = tuple(range(1, count + 1))
    for _ in range(args.rounds + 2):
        while not (asked := [e for e in sender.events() or () if isinstance(e, PagesRequested)]):
            time.sleep(0.0002)
        sender.begin((SendPages(asked[0].job, 0, numbers, last=True),))
    sys.stdin.read()
    sender.close()


def measure(args: argparse.Namespace, transfer: str) -> tuple[list[float], list[float]]:
    """Return the seconds of transfers, and of the copies between them."""
    words = [sys.executable, __file__, "--prefill", transfer]
    words += ["--tokens", str(args.tokens), "--rounds", str(args.rounds)]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdin is not None
    line = ""
    while not line.strip().isdigit():  # libraries print, too
        line = child.stdout.readline()
    pages = memory(args.tokens)
    receiver = Receiver(TcpNetwork(), pages, identity(), b"", how(transfer, pages))
    count = args.tokens // PAGE
    numbers = tuple(range(1, count + 1))
    source = np.full(count * pages[0].page_bytes, 1, np.uint8)
    target = np.zeros_like(source)
    spent: list[float] = []
    copies: list[float] = []
    for room in range(args.rounds + 2):
        receiver.begin((JoinRoom(room, HOST, int(line), room, b""), Receive(room, 0, numbers)))
        found: list[Received] = []
        for _ in itertools.count():
            events = receiver.events() or ()
            if bad := [e for e in events if type(e).__name__ in ("TransferFailed", "Refused")]:
                raise SystemExit(f"{transfer}: {bad[0]}")
            if found := [e for e in events if isinstance(e, Received)]:
                break
            time.sleep(0.0002)
        start = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - start)
        spent.append(found[0].seconds)
    child.stdin.close()
    child.wait()
    receiver.close()
    return spent[2:], copies[2:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transfers", nargs="+", default=TRANSFERS)
    parser.add_argument("--prefill")
    args = parser.parse_args()
    if args.prefill:
        prefill(args, args.prefill)
        return
    size = args.tokens // PAGE * memory(PAGE)[0].page_bytes
    for transfer in args.transfers:
        spent, copies = measure(args, transfer)
        ratios = sorted(c / s for c, s in zip(copies, spent, strict=True))
        found = {
            "transfer": transfer,
            "GB/s": round(size / statistics.median(spent) / 1e9, 2),
            "copy GB/s": round(size / statistics.median(copies) / 1e9, 2),
            "of a copy": round(statistics.median(copies) / statistics.median(spent), 2),
            "spread": [round(ratios[len(ratios) // 4], 2), round(ratios[-len(ratios) // 4], 2)],
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
