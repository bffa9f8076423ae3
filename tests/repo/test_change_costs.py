"""The usual additions, made in a copy of the sources: how many files each of them changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny import write_model

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "sylvan"
Edit = tuple[str, str, str]
"""A file, a line in it, and what is put before the line."""

ATTRIBUTE: list[Edit] = [
    (
        "protocol/requests.py",
        "    priority: int = 0  # larger is more urgent",
        "    mood: int = 0\n",
    ),
    (
        "api/request_fields.py",
        "    priority: Priority | None = None",
        "    mood: int | None = None\n",
    ),
    (
        "runtime/sched/scheduler.py",
        "        if request.rid in self._requests:",
        '        if getattr(request, "mood", 0) > 8:\n'
        '            raise RequestError("mood: too high", param="mood")\n',
    ),
]
SAMPLING: list[Edit] = [
    ("protocol/sampling.py", "    min_p: Annotated[", "    spice: float = 0.0\n"),
    ("api/request_fields.py", "    min_p: float | None = None", "    spice: float | None = None\n"),
    (
        "runtime/tokenizer/checks.py",
        "    if (fault := fault_of(sampling)) is not None:",
        '    if sampling.spice > 8:\n        raise RequestError("spice: too hot", param="spice")\n',
    ),
]
ROUTE: list[Edit] = [
    (
        "runtime/server/routes/native.py",
        "_GENERATION = (",
        "from sylvan.runtime.server.native import hello\n\n",
    ),
    (
        "runtime/server/routes/native.py",
        "    *aliases(",
        '    Endpoint(path="/hello", handler=hello.hello, methods=GET),\n',
    ),
]
COMMAND: list[Edit] = [
    (
        "protocol/messages.py",
        "Command = (",
        'class Hello(msgspec.Struct, frozen=True, tag="hello"):\n    """Say something."""\n\n\n',
    ),
    ("protocol/messages.py", "    | GetState", "    | Hello\n"),
    (
        "runtime/engine/scheduler_loop.py",
        "            case GetState():",
        '            case messages.Hello():\n                body = {"said": "hello"}\n',
    ),
    (
        "runtime/engine/scheduler_loop.py",
        "from sylvan.protocol.messages import (",
        "from sylvan.protocol import messages\n",
    ),
]
SETTING: list[Edit] = [
    ("config/tree.py", "    chat_template: str | None = None", '    greeting: str = "world"\n'),
]
HELLO = '''"""A new route, which sends the new command and reads the new setting."""

from sylvan.protocol.messages import Hello
from sylvan.runtime.server.endpoint import json_response


async def hello(call):
    """Say hello."""
    reply = await call.context.engine.control(Hello())
    return json_response({**reply.body, "to": call.context.settings.text.greeting})
'''
PROGRAM = """
import asyncio, sys
import httpx
from sylvan.runtime.engine.arguments import ServerArgs, configuration
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.server.app import create_app
from sylvan.runtime.server.settings import ServerSettings

async def main():
    args = ServerArgs(model_path=sys.argv[1], load_format="dummy", device="cpu", threads=1,
                      max_total_tokens=1024, text__greeting="you")
    config = configuration(args)
    runtime = await Runtime.start(config)
    try:
        app = create_app(runtime.manager, ServerSettings.from_config(config))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app),
                                     base_url="http://127.0.0.1") as http:
            said = await http.get("/hello")
            assert said.json() == {"said": "hello", "to": "you"}, said.text
            messages = [{"role": "user", "content": "x"}]
            for path, body in (("/v1/completions", {"prompt": "x"}),
                               ("/v1/chat/completions", {"messages": messages})):
                fine = await http.post(path, json={**body, "mood": 1, "spice": 1.0})
                assert fine.status_code == 200, fine.text
                for name in ("mood", "spice"):
                    reply = await http.post(path, json={**body, name: 9})
                    assert reply.status_code == 400 and reply.json()["param"] == name, reply.text
            reply = await http.post("/generate", json={"text": "x", "mood": 9})
            assert reply.status_code == 400 and "mood" in reply.text, reply.text
    finally:
        await runtime.close()

asyncio.run(main())
"""


def files(edits: list[Edit]) -> set[str]:
    return {file for file, _, _ in edits}


def test_additions_change_few_files() -> None:
    assert len(files(ATTRIBUTE)) <= 3
    assert len(files(SAMPLING)) <= 3
    assert len(files(ROUTE)) == 1  # and a new one
    assert len(files(COMMAND)) + 1 <= 3  # with who sends it
    assert len(files(SETTING)) + 1 <= 2  # with who reads it


@pytest.mark.slow
def test_these_changes_are_all_that_it_takes(tmp_path: Path) -> None:
    copy = tmp_path / "src" / "sylvan"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    (copy / "kernels" / "lib").symlink_to(SOURCES / "kernels" / "lib")
    for file, line, text in ATTRIBUTE + SAMPLING + ROUTE + COMMAND + SETTING:
        source = (copy / file).read_text()
        at = source.index("\n" + line) + 1
        (copy / file).write_text(source[:at] + text + source[at:])
    (copy / "runtime" / "server" / "native" / "hello.py").write_text(HELLO)
    model = write_model(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
