"""Claim: an hour of mixed load makes no process grow, and leaves nothing behind.

Many clients at a time send streams, unstreamed requests, grammars, tokenisation, stored responses,
files that are created and deleted, requests that are aborted, and invalid requests. Every few
seconds it records the private memory, open files and threads of each process. `growth` is the mean
of the last quarter over that of the second, when caches are full; at the end, what is left after
the load stopped is counted.

    python benchmarks/hostile/bench_soak.py [--minutes 60] [--clients 24] [--json PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from served import Server, family, serving, used

SAMPLE_S = 3.0
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


async def one(client: httpx.AsyncClient, dice: random.Random, counts: Counter[str]) -> None:
    """Do one action of a client, chosen at random."""
    word = f"Number {dice.randrange(400)} "
    sampling: dict[str, Any] = {"max_new_tokens": dice.randrange(1, 48), "temperature": 0.7}
    kind = dice.choice(("stream", "leave", "whole", "grammar", "error", "stored", "file", "tokens"))
    counts[kind] += 1
    if kind in ("stream", "leave"):
        body = {"text": word * dice.randrange(1, 20), "stream": True, "sampling_params": sampling}
        async with client.stream("POST", "/generate", json=body) as answer:
            async for _ in answer.aiter_bytes():
                if kind == "leave" and dice.random() < 0.4:
                    return
    elif kind == "whole":
        body = {"text": [word, word * 2], "sampling_params": {**sampling, "n": 2}}
        await client.post("/generate", json=body)
    elif kind == "grammar":
        body = {"text": word, "sampling_params": {**sampling, "json_schema": SCHEMA}}
        await client.post("/generate", json=body)
    elif kind == "error":
        wrong = (
            {"text": 5},
            {"text": "x", "sampling_params": {"top_p": 9}},
            {"input_ids": [10**9]},
        )
        answer = await client.post("/generate", json=dice.choice(wrong))
        assert answer.status_code == 400, answer.text
    elif kind == "stored":
        answer = await client.post("/v1/responses", json={"input": word, "max_output_tokens": 4})
        await client.delete(f"/v1/responses/{answer.json()['id']}")
    elif kind == "file":
        files = {"file": ("x", word.encode() * 200), "purpose": (None, "batch")}
        answer = await client.post("/v1/files", files=files)
        await client.delete(f"/v1/files/{answer.json()['id']}")
    else:
        await client.post("/tokenize", json={"prompt": word * 50})


async def load(
    port: int, clients: int, seconds: float, samples: list[Any], pid: int
) -> Counter[str]:
    """Run the clients, and record the resource usage of processes."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds

    async def client_(number: int) -> None:
        dice = random.Random(number)
        base = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=base, timeout=120) as client:
            while time.monotonic() < end:
                try:
                    await one(client, dice, counts)
                except (httpx.ReadError, httpx.RemoteProtocolError):
                    # a client that was idle meets the end of its kept connection, and comes back
                    counts["reconnected"] += 1

    async def watch() -> None:
        while time.monotonic() < end:
            samples.append({p: (name, used(p)) for p, name in family(pid).items()})
            await asyncio.sleep(SAMPLE_S)

    await asyncio.gather(watch(), *(client_(i) for i in range(clients)))
    return counts


def shared_files(server: Server) -> int:
    """Return the shared-memory files of a server's processes."""
    return sum(1 for folder in Path("/dev/shm").glob("sylvan-*") for _ in folder.iterdir())


def main() -> int:
    """Run the load; see the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    samples: list[dict[int, tuple[str, dict[str, float]]]] = []
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--server.data-dir", folder, "--cache.max-tokens", "32k")
        with serving("sapling", *flags) as server:
            pid, files = server.process.pid, shared_files(server)
            asyncio.run(load(server.port, args.clients, 20, [], pid))  # caches fill
            start = {p: used(p) for p in family(pid)}
            counts = asyncio.run(load(server.port, args.clients, args.minutes * 60, samples, pid))
            time.sleep(8)
            left = {p: used(p) for p in family(pid)}
            _, _, info = server.call("GET", "/server_info")
            state = json.loads(info)["internal_states"][0]["load"]
            after = shared_files(server)
    rows = []
    for p in left.keys() & start.keys():
        series = [sample[p][1]["mb"] for sample in samples if p in sample]
        quarter = max(1, len(series) // 4)
        early, late = series[quarter : 2 * quarter], series[-quarter:]
        row = {
            "process": samples[-1][p][0],
            "mb": round(statistics.mean(late), 1),
            "growth": round(statistics.mean(late) / statistics.mean(early), 4),
            "files": [start[p]["files"], left[p]["files"]],
            "threads": [start[p]["threads"], left[p]["threads"]],
        }
        rows.append(row)
        print(json.dumps(row))
    end = {
        "minutes": args.minutes,
        "calls": counts.total(),
        "kinds": dict(counts),
        "shared_files": [files, after],
        "running": state["num_running_reqs"],
        "repaired": [state[f"repaired_{name}"] for name in ("pages", "locks", "states")],
        "processes_started_anew": len(left.keys() - start.keys()),
        "tracebacks": server.said("Traceback"),
    }
    print(json.dumps(end))
    if args.json:
        args.json.write_text(json.dumps({"processes": rows, **end}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
