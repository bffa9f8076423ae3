"""Phoenix, an OTLP backend that is not ours, shows the spans of a server, joined as they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from steps import KEY, MODEL, run, step

URL = sys.argv[1]
PORT = 16006  # of the server's flags in run.py
PHOENIX = f"http://127.0.0.1:{PORT}"
PATIENCE_S = 120.0
ROOT = "POST /v1/chat/completions"
STAGES = {"tokenize", "prefill_forward", "decode_forward", "detokenize"}


def ask(url: str, body: Any = None) -> Any:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {KEY}"})
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def spans() -> list[Any]:
    try:
        return ask(f"{PHOENIX}/v1/projects/default/spans?limit=100")["data"]
    except (urllib.error.URLError, ConnectionError):
        return []  # it is not ready, or has no spans yet


@step
def one_request_is_one_tree():
    with tempfile.TemporaryDirectory() as folder:
        own = {"PHOENIX_PORT": str(PORT), "PHOENIX_GRPC_PORT": "0", "PHOENIX_HOST": "127.0.0.1"}
        own |= {"PHOENIX_WORKING_DIR": folder, "PHOENIX_TELEMETRY_ENABLED": "false"}
        program = str(Path(sys.executable).parent / "phoenix")
        server = subprocess.Popen(
            [program, "serve"],
            env={**os.environ, **own},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until = time.monotonic() + PATIENCE_S
            found: list[Any] = []
            while not {span["name"] for span in found} >= STAGES | {ROOT}:
                assert time.monotonic() < until, {span["name"] for span in found}
                assert server.poll() is None, "Phoenix has ended"
                messages = [{"role": "user", "content": "Hello"}]
                ask(f"{URL}/v1/chat/completions", {"model": MODEL, "messages": messages})
                time.sleep(2)
                found = spans()
        finally:
            server.terminate()
            server.wait(60)
    roots = [span for span in found if span["name"] == ROOT]
    assert roots
    root = roots[0]["context"]
    stages = [span for span in found if span["parent_id"] == root["span_id"]]
    assert {span["name"] for span in stages} >= STAGES
    assert {span["context"]["trace_id"] for span in stages} == {root["trace_id"]}


run("arize-phoenix")
