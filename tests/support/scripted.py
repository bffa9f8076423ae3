"""A scripted engine: the real TokenizerManager over a fake scheduler."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sylvan.protocol.messages import (
    Abort,
    Control,
    ControlReply,
    Finish,
    FlushCache,
    Heartbeat,
    SchedulerLoad,
    Submit,
    TextBatch,
    TextOutput,
    Timing,
    TokenLogprobs,
    TokenOutput,
    Usage,
)
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.tokenizer.manager import TokenizerManager
from sylvan.runtime.tokenizer.scheduler_client import SchedulerClient
from sylvan.runtime.tokenizer.types import ServedModelInfo
from sylvan.text.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    'Answer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
    "{%- endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)

Script = Callable[[GenerateRequest, str], str]
"""Request and text of its prompt to the text of its answer."""


def echo(request: GenerateRequest, prompt: str) -> str:
    """Repeat the prompt, so that answers differ."""
    return prompt


def write_checkpoint(folder: Path) -> Path:
    """A model directory with a tokenizer in which every byte is a token."""
    backend = Backend(models.BPE(vocab=_bytes_vocab(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    return folder


def _bytes_vocab() -> dict[str, int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {char: i for i, char in enumerate(alphabet)}


@dataclass
class Behaviour:
    """The behaviour of the fake scheduler.

    Attributes:
        script: The answers.
        hold: Answer nothing; requests end by abort only.
        per_message: Tokens per message.
        busy: Refuse `FlushCache`.
        given: Number of tokens generated so far.
        masked: All alternatives of a token except the most likely one are impossible.
    """

    script: Script = echo
    hold: bool = False
    per_message: int = 1
    busy: bool = False
    fail: Finish | None = None
    fail_after: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    embeds: list[EmbedRequest] = field(default_factory=list)
    commands: list[object] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    given: int = 0
    masked: bool = False


NO_CACHE = {"nodes": [], "divergence": {"ours": [], "theirs": []}}
"""Answer to all questions about the prefix cache."""


class ScriptedScheduler:
    """Answers `Submit` with the text of a script, a token at a time, on the event loop."""

    def __init__(self, tokenizer: Tokenizer, control: Behaviour) -> None:
        self.control = control
        self.load = SchedulerLoad(max_total_num_tokens=4096)
        self._tokenizer = tokenizer
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._usages: dict[str, Usage] = {}
        self.manager: TokenizerManager

    def send(self, message: object) -> None:
        """Receive a message of the manager."""
        if isinstance(message, Submit):
            request = message.request
            if isinstance(request, EmbedRequest):
                self.control.embeds.append(request)
                asyncio.get_running_loop().call_soon(self._embed, request)
                return
            self.control.requests.append(request)
            self._tasks[request.rid] = asyncio.create_task(self._answer(request))
        elif isinstance(message, Abort):
            self.control.aborted.append(message.rid)
            task = self._tasks.pop(message.rid, None)
            if task is not None or self.control.hold:
                if task is not None:
                    task.cancel()
                usage = self._usages.get(message.rid, Usage())
                self._emit(message.rid, "", (), usage, message.finish)
        elif isinstance(message, Control):
            self.control.commands.append(message.command)
            asyncio.get_running_loop().call_soon(self._reply, message)

    @property
    def client(self) -> SchedulerClient:
        """The manager's client of this scheduler."""
        return self.manager.router.clients[0]

    def beat(self) -> None:
        """Send a heartbeat."""
        self.client.on_message(Heartbeat(load=self.load))

    def _reply(self, message: Control) -> None:
        good = not (isinstance(message.command, FlushCache) and self.control.busy)
        reply = ControlReply(id=message.id, ok=good, message="" if good else "busy", body=NO_CACHE)
        self.client.on_message(reply)

    def _embed(self, request: EmbedRequest) -> None:
        if self.control.hold:
            return
        facts, ids = self.manager.facts, request.input_ids
        rows = np.cos(np.outer(ids + 1, np.arange(1, facts.vector_size + 1)))
        if request.spans:
            values = np.stack([rows[start:stop].mean(0) for start, stop in request.spans])
        elif request.form == "weights":
            values = rows[:, 0].clip(0)
        elif request.form == "text":
            values = rows.sum(0)[: request.dimensions]
        else:
            values = rows[:, : request.dimensions]
        if facts.task == "embed" and request.form != "weights":
            values = values / np.linalg.norm(values, axis=-1, keepdims=True)
        values = values.astype(np.float32)
        usage = Usage(prompt_tokens=len(ids), cached_tokens=len(ids) // 2)
        end = self.control.fail or Finish(type="stop")
        self._emit(request.rid, "", (), usage, end, embedding=values)

    async def _answer(self, request: GenerateRequest) -> None:
        control = self.control
        if control.hold:
            return
        prompt = self._tokenizer.decode(request.input_ids.tolist(), skip_special_tokens=False)
        text, finish = self._cut(request, control.script(request, prompt))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        limit = request.sampling.max_new_tokens or 0
        if len(ids) >= limit:
            ids, finish = ids[:limit], Finish(type="length", length=limit)
        elif isinstance(finish.matched, int):
            ids = [*ids, finish.matched]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        step, begun = control.per_message, len(request.output_ids)
        assert request.output_ids.tolist() == ids[:begun], "what is continued is what was begun"
        decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids[:begun])))
        for at in range(begun, max(begun + 1, len(ids)), step):
            await asyncio.sleep(0)
            part = tuple(ids[at : at + step])
            last = at + step >= len(ids)
            usage = Usage(
                prompt_tokens=len(request.input_ids),
                completion_tokens=min(at + step, len(ids)),
                cached_tokens=len(request.input_ids) // 2,
            )
            shown = [i for i in part if not (last and i == finish.matched)]
            data = b"".join(
                self._tokenizer.token_bytes(i)
                for i in shown
                if not (request.sampling.skip_special_tokens and i in self._tokenizer.special_ids)
            )
            fail = control.fail if control.fail and at >= control.fail_after else None
            end = fail or (finish if last else None)
            logprobs = _logprobs(request, part, False)
            if control.masked and logprobs is not None and logprobs.top_logprobs is not None:
                logprobs.top_logprobs[:, 1:] = -np.inf
            self._emit(
                request.rid,
                decoder.decode(data, last),
                part,
                usage,
                end,
                logprobs=logprobs,
                prompt=_logprobs(request, request.input_ids.tolist(), True) if at == 0 else None,
            )
            if end is not None:
                break
        self._tasks.pop(request.rid, None)

    def _cut(self, request: GenerateRequest, text: str) -> tuple[str, Finish]:
        found = [(text.find(stop), stop) for stop in request.sampling.stop if stop in text]
        if found:
            at, stop = min(found)
            return text[:at], Finish(type="stop", matched=stop)
        eos = request.eos_ids[0] if request.eos_ids else 0
        return text, Finish(type="stop", matched=eos)

    def _emit(
        self,
        rid: str,
        text: str,
        ids: Sequence[int],
        usage: Usage,
        finish: Finish | None,
        logprobs: TokenLogprobs | None = None,
        prompt: TokenLogprobs | None = None,
        embedding: np.ndarray | None = None,
    ) -> None:
        self._usages[rid] = usage
        self.control.given += len(ids)
        output = TokenOutput(
            rid=rid,
            token_ids=tuple(ids),
            usage=usage,
            finish=finish,
            logprobs=logprobs,
            prompt_logprobs=prompt,
            embedding=embedding,
            timing=Timing(received=1.0, started=1.5, first_token=2.0, finished=3.0)
            if finish
            else None,
        )
        self.client.on_texts(TextBatch(outputs=(TextOutput(rid=rid, text=text, output=output),)))


def _logprobs(
    request: GenerateRequest, ids: Sequence[int], of_prompt: bool
) -> TokenLogprobs | None:
    options = request.logprobs
    if options is None or (of_prompt and options.start is None):
        return None
    if of_prompt:
        ids = ids[options.start :]
    n = len(ids)
    values = np.linspace(-0.5, -1.0, n, dtype=np.float32) if n else np.empty(0, np.float32)
    if of_prompt and options.start == 0:
        values[0] = np.nan
    tops = np.tile(np.arange(options.top, dtype=np.int32), (n, 1)) if options.top else None
    if tops is not None and of_prompt and options.start == 0:
        tops[0] = -1
    return TokenLogprobs(
        token_ids=np.array(ids, np.int32),
        logprobs=values,
        top_ids=tops,
        top_logprobs=None if tops is None else -1.0 - tops.astype(np.float32),
        chosen_logprobs=np.full((n, len(options.token_ids)), -3.0, np.float32)
        if options.token_ids
        else None,
    )


@dataclass
class ScriptedEngine:
    """The manager, and how its scheduler behaves."""

    manager: TokenizerManager
    scheduler: ScriptedScheduler
    control: Behaviour


def make_engine(
    checkpoint: Path,
    tokenizer: Tokenizer | None = None,
    context_len: int = 2048,
    **facts_of_it: Any,
) -> ScriptedEngine:
    """Return an engine over the tokenizer of `checkpoint`."""
    tokenizer = tokenizer or Tokenizer.load(checkpoint)
    control = Behaviour()
    scheduler = ScriptedScheduler(tokenizer, control)
    manager = TokenizerManager(tokenizer)
    scheduler.manager = manager
    facts = ServedModelInfo(
        model_path=str(checkpoint),
        served_name="scripted",
        context_len=context_len,
        vocab_size=tokenizer.vocab_size,
        eos_ids=tokenizer.eos_ids,
        max_total_tokens=4096,
        max_running_reqs=16,
        architecture="LlamaForCausalLM",
        model_type="llama",
        **facts_of_it,
    )
    scheduler.client.connect(scheduler.send, facts)
    return ScriptedEngine(manager, scheduler, control)
