"""The table of files that a chat request enters, in docs/architecture.md, against a request."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import sylvan
from sylvan.runtime.engine.arguments import ServerArgs, configuration
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.engine.scheduler_loop import Ports
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.runtime.server.app import create_app
from sylvan.runtime.server.openai import chat
from sylvan.runtime.tokenizer.detokenizer import DetokenizerManager
from sylvan.runtime.tokenizer.live import SampleState
from sylvan.runtime.tokenizer.scheduler_client import SchedulerClient
from tests.support.settings import settings_of
from tests.support.tiny import write_model

SOURCES = Path(sylvan.__file__).parent
PAGE = Path(__file__).parents[4] / "docs" / "architecture.md"
HANDOVERS: tuple[tuple[type, str], ...] = (
    (SchedulerClient, "_submit"),
    (Scheduler, "add"),
    (Ports, "emit"),
    (DetokenizerManager, "handle"),
    (SampleState, "accept"),
    (SampleState, "drain"),
    (chat._Writer, "write"),
)
"""Where the request, or its answer, passes from one part to the next."""


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Files on the stack at each hand-over, in the order in which they are entered."""
    found: dict[str, None] = {}

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            frame: Any = sys._getframe(1)
            stack = [call.__code__.co_filename]
            while frame is not None:
                stack.append(frame.f_code.co_filename)
                frame = frame.f_back
            for file in reversed(stack):
                if Path(file).is_relative_to(SOURCES):
                    found[str(Path(file).relative_to(SOURCES))] = None
            return call(*args, **kwargs)

        return noted

    for kind, name in HANDOVERS:
        patch.setattr(kind, name, noting(getattr(kind, name)))
    order: list[str] = []
    yield order
    order.extend(found)


def documented() -> list[str]:
    page = PAGE.read_text()
    table = page[page.index("<!-- way -->") : page.index("<!-- /way -->")]
    return re.findall(r"^\| `([\w/]+\.py)` \|", table, re.MULTILINE)


async def test_the_page_names_the_files_on_a_requests_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ServerArgs(
        model_path=str(write_model(tmp_path)),
        load_format="dummy",
        device="cpu",
        threads=1,
        max_total_tokens=1024,
    )
    runtime = await Runtime.start(configuration(args))
    try:
        app = create_app(runtime.manager, settings_of(served_model_name="tiny"))
        transport = httpx.ASGITransport(app)
        with watched(monkeypatch) as entered:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
                reply = await http.post("/v1/chat/completions", json=body | {"max_tokens": 8})
        assert reply.status_code == 200
        assert json.loads(reply.text.split("\n\n")[0].removeprefix("data: "))["choices"]
    finally:
        await runtime.close()
    assert len(entered) <= 20
    assert sorted(documented()) == sorted(entered), "\n".join(entered)
