"""A server whose engine answers at once, to measure the cost of HTTP alone.

python benchmarks/server/instant.py PORT
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import uvicorn
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))

from sylvan.protocol.messages import (
    Abort,
    Finish,
    Heartbeat,
    SchedulerLoad,
    Submit,
    TextBatch,
    TextOutput,
    TokenOutput,
    Usage,
)
from sylvan.runtime.server.app import create_app
from sylvan.runtime.server.settings import ServerSettings
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.types import ServedModelInfo
from sylvan.text.tokenizer import Tokenizer
from tests.support.scripted import write_checkpoint

WORD = " word"


class InstantScheduler:
    """Emits one token for every live request in each turn of the event loop."""

    def __init__(self) -> None:
        self.manager: TokenizerManager
        self._live: dict[str, list[int]] = {}  # rid -> prompt tokens, made, wanted
        self._stepping = False

    def send(self, message: object) -> None:
        if isinstance(message, Submit):
            request = message.request
            wanted = request.sampling.max_new_tokens
            self._live[request.rid] = [len(request.input_ids), 0, wanted]
            if not self._stepping:
                self._stepping = True
                asyncio.get_running_loop().call_soon(self._step)
        elif isinstance(message, Abort):
            self._live.pop(message.rid, None)

    def _step(self) -> None:
        outputs = []
        for rid, state in tuple(self._live.items()):
            state[1] += 1
            done = state[1] >= state[2]
            output = TokenOutput(
                rid=rid,
                token_ids=(5,),
                usage=Usage(prompt_tokens=state[0], completion_tokens=state[1]),
                finish=Finish(type="length", length=state[2]) if done else None,
            )
            outputs.append(TextOutput(rid=rid, text=WORD, output=output))
            if done:
                del self._live[rid]
        self.manager.router.clients[0].on_texts(TextBatch(outputs=tuple(outputs)))
        self._stepping = bool(self._live)
        if self._stepping:
            asyncio.get_running_loop().call_soon(self._step)


async def beat(manager: TokenizerManager) -> None:
    while True:
        manager.router.clients[0].on_message(Heartbeat(load=SchedulerLoad()))
        await asyncio.sleep(0.5)


async def serve(port: int, folder: Path) -> None:
    tokenizer = Tokenizer.load(write_checkpoint(folder))
    manager, scheduler = TokenizerManager(tokenizer), InstantScheduler()
    scheduler.manager = manager
    facts = ServedModelInfo(
        model_path=str(folder),
        served_name="instant",
        context_len=65536,
        vocab_size=tokenizer.vocab_size,
        eos_ids=tokenizer.eos_ids,
    )
    manager.router.clients[0].connect(scheduler.send, facts)
    beating = asyncio.create_task(beat(manager))
    app = create_app(manager, ServerSettings(served_model_name="instant"))
    config = uvicorn.Config(app, port=port, log_config=None, lifespan="off", access_log=False)
    await uvicorn.Server(config).serve()
    beating.cancel()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(serve(int(sys.argv[1]), Path(folder)))
