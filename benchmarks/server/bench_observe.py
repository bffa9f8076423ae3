"""Claim: with all observability on, a batch of 32 is served at 0.98 of the speed or more.

Compares two servers of the same model, one under load at a time: pairs of runs in both orders, each
of which yields a ratio. "On" is a trace collector that accepts everything, requests logged to files
with prompts and outputs, an access log, custom labels, and a scrape each second. "Off" is a server
without any of that; with `--baseline DIR` it runs the sources of another directory, such as a
checkout of an earlier version, so that what is always on is measured as well. Also reports how far
two runs of the same server differ, and the processor time of the API process, where nearly all of
this happens and which other programs on the machine affect little. Takes about two minutes.

    python benchmarks/server/bench_observe.py [--model sapling] [--pairs 24] [--baseline DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.support.collector import collector

BATCH, TOKENS = 32, 192
LABELS = json.dumps({"team": "bench"})


@dataclass(frozen=True)
class Served:
    """A server: its address, and the process ID of its API process."""

    address: str
    pid: int

    def cpu_s(self) -> float:
        """Return the processor time of the API process so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(model: str, *flags: str, sources: str | None = None) -> Iterator[Served]:
    """Run `sylvan serve`."""
    code = "import sys; from sylvan.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", model, "--until-eof", "--server.port", "0"]
    environ = dict(os.environ)
    if sources is not None:
        environ["PYTHONPATH"] = sources
    process = subprocess.Popen(
        [*command, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        for line in process.stdout:
            if found := re.search(r"serves \S+ at http://([^/\s]+)", line):
                yield Served(found[1], process.pid)
                break
        else:
            sys.exit("a server did not start")
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


async def stream(address: str, number: int) -> int:
    """Return the bytes of one answer."""
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**26)
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    text = f"Number {number}: tell me a story about the sea and the people who live by it."
    body = json.dumps({"text": text, "stream": True, "sampling_params": sampling}).encode()
    head = (
        "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"x-custom-labels: {LABELS}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    data = await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()
    assert b" 200 " in data[:20], data[:300]
    return len(data)


async def batch(address: str) -> float:
    """Return tokens per second of a batch."""
    began = time.perf_counter()
    await asyncio.gather(*(stream(address, number) for number in range(BATCH)))
    return BATCH * TOKENS / (time.perf_counter() - began)


def scrape(address: str, ended: threading.Event) -> None:
    while not ended.wait(1.0):
        urllib.request.urlopen(f"http://{address}/metrics").read()


def bounds(ratios: list[float]) -> list[float]:
    """Return the 95 % confidence interval of the median, by resampling."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return [round(medians[100], 4), round(medians[-100], 4)]


def quartiles(ratios: list[float]) -> list[float]:
    return [round(q, 4) for q in statistics.quantiles(ratios, n=4)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="sapling")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--baseline", help="sources for the server without observability")
    args = parser.parse_args()
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder, collector() as collected:
        on = (
            *("--enable-trace", "--otlp-traces-endpoint", collected.grpc_url),
            *("--log-requests", "--log-requests-format", "json"),
            *("--log-requests-target", folder, "--server.access-log"),
            *("--observe.custom-labels", "team"),
        )
        with (
            server(args.model, *on) as observed,
            server(args.model, sources=args.baseline) as plain,
        ):
            for each in (observed, plain):
                asyncio.run(batch(each.address))
            ratios, rates, cpu_s = [], {observed: [], plain: []}, {observed: 0.0, plain: 0.0}
            for pair in range(args.pairs):
                order = (observed, plain) if pair % 2 else (plain, observed)
                for each in order:
                    before_s = each.cpu_s()
                    if each is observed:
                        ended.clear()
                        scraper = threading.Thread(target=scrape, args=(each.address, ended))
                        scraper.start()
                    rates[each].append(asyncio.run(batch(each.address)))
                    if each is observed:
                        ended.set()
                        scraper.join()
                    cpu_s[each] += each.cpu_s() - before_s
                ratios.append(rates[observed][-1] / rates[plain][-1])
        logged = len((Path(folder) / "requests.log").read_text().splitlines())
        spans = len(collected.spans)
    found = {
        "model": args.model,
        "batch": BATCH,
        "tokens": TOKENS,
        "pairs": args.pairs,
        "on_tokens_s": round(statistics.median(rates[observed])),
        "off_tokens_s": round(statistics.median(rates[plain])),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_95": bounds(ratios),
        "ratio_quartiles": quartiles(ratios),
        "api_cpu_us_per_token": {
            name: round(1e6 * cpu_s[each] / (args.pairs * BATCH * TOKENS), 2)
            for name, each in (("on", observed), ("off", plain))
        },
        "same_server_quartiles": quartiles([b / a for a, b in pairwise(rates[plain])]),
        "spans": spans,
        "log_lines": logged,
        "baseline": args.baseline is not None,
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
