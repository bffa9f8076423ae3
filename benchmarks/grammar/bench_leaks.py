"""Claim: grammars that do not compile leak nothing: no threads, files or processes, and bounded
memory.

    python benchmarks/grammar/bench_leaks.py [--count 10000] [--backend llguidance]

Each grammar is new and passes through the compile process; refusals are cached, limited by bytes.
Memory is compared with the state after the first tenth, when caches and allocators are warm. The
exit code is 1 if a bad grammar was accepted, the good one at the end was refused, or anything grew:
threads, files and processes at all, memory by more than the cache of refusals.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

from sylvan.runtime.features.grammar.compiler.client import CompilerSetup, GrammarCompiler, Ticket
from sylvan.runtime.features.grammar.limits import Limits
from sylvan.runtime.features.grammar.loaders import Loaders
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.vocabulary import GreedyEncoder, Vocabulary

AT_ONCE = 32
MAX_KIB = {"kib": 64 << 10, "their_kib": 16 << 10}
"""Refusals are kept, with their reasons, up to a size; allocators keep what was freed."""
UNHURT = ("xgrammar", "combined")
"""Regexes of exponential size are no trouble to these, and are not refused."""
HARD_EACH = 64  # it takes seconds, where others take milliseconds


def bad(i: int, backend: str) -> GrammarSpec:
    """Return a grammar that does not compile, a different one for each number."""
    if i % HARD_EACH == HARD_EACH - 1 and backend not in UNHURT:
        return GrammarSpec("regex", "(" * 7 + "a" + "{40})" * 7 + str(i))
    return (
        GrammarSpec("regex", f"(a{i}"),
        GrammarSpec("json_schema", json.dumps({"type": f"nope{i}"})),
        GrammarSpec("json_schema", json.dumps({"$ref": f"#/$defs/{i}"})),
        GrammarSpec("json_schema", json.dumps({"title": str(i), "$ref": "#"})),
        GrammarSpec("json_schema", '{"type":"array","items":' * 200 + str(i) + "}" * 200),
        GrammarSpec("ebnf", f'root ::= "a{i}" | missing'),
        GrammarSpec("structural_tag", json.dumps({"format": {"type": f"wrong{i}"}})),
        GrammarSpec("regex", "x" * 100_000 + f"[b-a]{i}"),
    )[i % 8]


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmRSS"))


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def state(compiler: GrammarCompiler) -> dict[str, int]:
    gc.collect()
    pids = [compiler._pool.pid] if compiler._pool.pid is not None else []
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "processes": len(pids),
        "their_files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "children": sum(len(children(pid)) for pid in pids),
        "kib": resident_kib(os.getpid()),
        "their_kib": sum(map(resident_kib, pids)),
    }


def refuse(compiler: GrammarCompiler, numbers: range, backend: str) -> int:
    """Have grammars refused; return how many were."""
    refused = 0
    for start in range(numbers.start, numbers.stop, AT_ONCE):
        some = range(start, min(start + AT_ONCE, numbers.stop))
        tickets: list[Ticket] = [compiler.request(bad(i, backend)) for i in some]
        while not all(t.done for t in tickets):
            time.sleep(0.001)
        for ticket in tickets:
            refused += ticket.error is not None and ticket.error.status == 400
            compiler.forget(ticket)
    return refused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--backend", default="llguidance")
    options = parser.parse_args()
    tokens = [*(bytes([i]) for i in range(256)), b"<|end|>"]
    special = {"<|end|>": 256}
    words = Vocabulary(tokens, special, (256,), GreedyEncoder(tokens, frozenset({256})))
    limits = Limits()
    compiler = GrammarCompiler(
        options.backend, lambda: CompilerSetup(Loaders(words, limits)), limits
    )
    began_s = time.perf_counter()
    warm = max(8, options.count // 10)
    refused = refuse(compiler, range(warm), options.backend)
    before = state(compiler)
    refused += refuse(compiler, range(warm, options.count), options.backend)
    after = state(compiler)
    good = compiler.request(GrammarSpec("regex", "a+"))
    while not good.done:
        time.sleep(0.001)
    compiler.close()
    grown = {key: after[key] - before[key] for key in before}
    leaks = [key for key, more in grown.items() if more > MAX_KIB.get(key, 0)]
    report = {
        "refused": refused,
        "of": options.count,
        "good_one_after": good.error is None,
        "processes_started": compiler.stats.restarts,
        "seconds": round(time.perf_counter() - began_s, 1),
        "before": before,
        "after": after,
        "grown": grown,
        "leaks": leaks,
    }
    print(json.dumps(report))
    return int(bool(leaks) or refused != options.count or good.error is not None)


if __name__ == "__main__":
    sys.exit(main())
