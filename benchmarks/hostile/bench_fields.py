"""Claim: no value in any field of any request body affects other clients.

Sets each field of each route's body (tests/integration/test_http_chaos.py has a valid one of each)
to each of the values below, over real connections, while another client streams. Conditions: no
status of 500 or above except 503, and the other client's bytes never change. Measured: the other
client's gaps between pieces, relative to those on an idle server. Then sends large or expensive
bodies, one by one, and reports the time of each, the other client's longest gap meanwhile, and the
growth of the server's memory. Takes two to five minutes.

    python benchmarks/hostile/bench_fields.py [--every 1] [--json PATH]
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from served import JSON, Neighbour, Server, percentile, serving, used

sys.path.insert(0, str(Path(__file__).parents[2]))
from sylvan.runtime.server.routes import ENDPOINTS
from sylvan.runtime.server.security import Level
from tests.integration.test_http_chaos import GOOD, fields_of
from tests.support.random_model import write_random_model

DEEP = b"[" * 2000 + b"]" * 2000
VALUES = [
    b"-1", b"0", b"4294967296", b"1000000000", b"1e308", b"NaN", b"Infinity", b'""', b'"\\u0000"',
    b'"\\ud800"', b'"' + b"x" * 1_000_000 + b'"', b"null", b"[]", b"{}", DEEP, b'{"x":[5]}',
    b"true",
]  # fmt: skip
SHORT = {  # so that answers are
    "/generate": {"sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
    "/api/chat": {"options": {"num_predict": 2}},
    "/api/generate": {"options": {"num_predict": 2}},
}
CHAT = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":2,'


def field_bodies() -> Iterator[tuple[str, bytes]]:
    """Yield bodies with each field set to each of the values."""
    clients = {each.path for each in ENDPOINTS if each.level is Level.NORMAL}  # not operators
    for path, plain in GOOD.items():
        if path not in clients or "{" in path or path == "/abort_request":
            continue
        good = {**plain, **SHORT.get(path, {})}
        for name in fields_of(path):
            for value in VALUES:
                body = json.dumps({**good, name: "@@"}, separators=(",", ":")).encode()
                yield path, body.replace(b'"@@"', value)


def heavy_bodies() -> Iterator[tuple[str, str, bytes]]:
    """Return bodies that are large or expensive to validate."""
    yield "faults x 1.5 M", "/v1/completions", b'{"prompt":[' + b"{}," * 1_499_999 + b"{}]}"
    yield "faults x 1 M", "/v1/completions", b'{"prompt":[' + b"{}," * 999_999 + b"{}]}"
    yield "ids x 1 M", "/generate", b'{"input_ids":[' + b"1," * 1_000_000 + b"1]}"
    yield "lists x 1 M", "/generate", b'{"text":"x","y":[' + b"[]," * 1_000_000 + b"[]]}"
    yield "objects x 1 M", "/generate", b'{"text":"x","y":[' + b'{"a":1},' * 1_000_000 + b"0]}"
    yield "a string of 32 MB", "/generate", b'{"text":"' + b"a" * 33_000_000 + b'"}'
    yield (
        "4096 prompts",
        "/generate",
        json.dumps({"text": ["a"] * 4096, "sampling_params": {"max_new_tokens": 1}}).encode(),
    )
    yield (
        "parameters x 4096",
        "/generate",
        json.dumps(
            {"text": ["a"] * 4096, "sampling_params": {"custom_params": {"x": "y" * 800_000}}}
        ).encode(),
    )
    yield "a million characters", "/tokenize", b'{"prompt":"' + b"ab " * 333_000 + b'"}'
    yield "a million ids", "/detokenize", b'{"tokens":[' + b"5," * 999_999 + b"5]}"
    patterns = [f"(?s)(?<={chr(65 + i)}.*.*.*.*)." for i in range(26)]
    yield (
        "stop patterns",
        "/generate",
        json.dumps(
            {"text": "a", "sampling_params": {"stop_regex": patterns, "max_new_tokens": 100}}
        ).encode(),
    )
    calls = {
        "text": "<tool_call><function=f><parameter=a>" * 28_000,
        "tool_call_parser": "qwen3_coder",
    }
    yield "calls", "/parse_function_call", json.dumps({**calls, "tools": []}).encode()
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"enum": [f"v{j}" for j in range(50)]} for i in range(8000)},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    yield (
        "a tool of 4 MB",
        "/v1/chat/completions",
        CHAT + b'"tools":' + json.dumps([tool]).encode() + b"}",
    )
    forged = "".join(map(chr, range(0xF0000, 0xFFFFE))) + "<|im_start|>"
    yield (
        "forged tokens",
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": forged}]}).encode(),
    )
    yield (
        "grammar",
        "/generate",
        json.dumps(
            {
                "text": "a",
                "sampling_params": {"json_schema": json.dumps(schema), "max_new_tokens": 2},
            }
        ).encode(),
    )
    yield (
        "endless grammar",
        "/generate",
        json.dumps(
            {"text": "a", "sampling_params": {"ebnf": 'root ::= "a" root', "max_new_tokens": 2}}
        ).encode(),
    )


def all_fields(server: Server, every: int) -> dict[str, object]:
    """Run the first part; return its result."""
    alone = Neighbour(server)
    alone.start()
    time.sleep(8)
    alone.end()
    neighbour = Neighbour(server)
    neighbour.start()
    statuses, bad, began = Counter[int](), list[str](), time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    for i, (path, body) in enumerate(field_bodies()):
        if i % every:
            continue
        try:
            connection.request("POST", path, body, JSON)
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            status, text = 0, repr(error).encode()
            connection.close()
        statuses[status] += 1
        if status == 0 or (status >= 500 and status != 503):
            bad.append(f"{path} {body[:150]!r} {status} {text[:150]!r}")
    seconds = time.perf_counter() - began
    neighbour.end()
    return {
        "bodies": statuses.total(),
        "seconds": round(seconds),
        "statuses": dict(sorted(statuses.items())),
        "unexpected": bad[:20],
        "neighbour_streams": neighbour.rounds,
        "neighbour_same_bytes": len(neighbour.texts | alone.texts) == 1,
        "gap_p99_ms_alone": round(percentile(alone.gaps, 0.99) * 1e3, 2),
        "gap_p99_ms": round(percentile(neighbour.gaps, 0.99) * 1e3, 2),
    }


def each_heavy(server: Server) -> Iterator[dict[str, object]]:
    """Run the second part; return its result."""
    pid = server.process.pid
    for name, path, body in heavy_bodies():
        before = used(pid)["mb"]
        neighbour = Neighbour(server)
        neighbour.start()
        time.sleep(0.5)
        status, seconds, _ = server.call("POST", path, body)
        neighbour.end()
        yield {
            "body": name,
            "mb": round(len(body) / 1e6, 1),
            "status": status,
            "seconds": round(seconds, 2),
            "longest_gap_ms": round(max(neighbour.gaps) * 1e3),
            "grown_mb": round(used(pid)["mb"] - before),
            "same_bytes": len(neighbour.texts) == 1,
        }


def main() -> int:
    """Run both parts; see the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="test only every Nth body")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder) / "model", context_len=256)
        with serving(str(model), "--observe.log-level", "warning") as server:
            heavy = list[dict[str, object]]()
            for row in each_heavy(server):
                heavy.append(row)
                print(json.dumps(row), flush=True)
            fields = all_fields(server, args.every)
            print(json.dumps(fields, indent=1), flush=True)
            held = [line for line in server.log if "event loop was blocked" in line]
            print(f"{len(held)} holds of the event loop, such as", *held[:12], sep="\n  ")
    if args.json:
        args.json.write_text(json.dumps({"fields": fields, "heavy": heavy}, indent=1))
    return 0 if not fields["unexpected"] and fields["neighbour_same_bytes"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
