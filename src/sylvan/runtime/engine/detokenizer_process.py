"""The detokenizer process, started by the supervisor."""

from __future__ import annotations

from typing import Any, cast

from sylvan.protocol.messages import Alive, Ready, ToDetokenizer
from sylvan.runtime.engine.child_main import ChildMain, run_start
from sylvan.runtime.engine.detokenizer_loop import DetokenizerLoop, TextPorts
from sylvan.runtime.engine.text import load_tokenizer
from sylvan.runtime.tokenizer.detokenizer import DetokenizerManager
from sylvan.text.tokenizer import Tokenizer

_HEARTBEAT_S = 2.0  # frequent enough, and cheap while idle


def main() -> int:
    """Serve until the parent stops this process; return the exit code."""
    child = ChildMain.start()
    texts = cast(Any, child.sender("texts"))
    tokenizer: Tokenizer | None = None

    def start() -> None:
        nonlocal tokenizer
        tokenizer = load_tokenizer(child.config)

    code = run_start(texts, start)
    if tokenizer is not None:
        inbox = cast(Any, child.receiver(ToDetokenizer, "inbox"))
        ports = TextPorts(inbox, texts, cast(Any, child.sender("stops")))
        texts.send(Ready(facts={}))
        heartbeat_s = min(_HEARTBEAT_S, child.config.scheduler.hang_timeout_s / 4)
        DetokenizerLoop(DetokenizerManager(tokenizer), ports).run(
            lambda: texts.send(Alive()), heartbeat_s
        )
    child.finish()
    return code
