"""Claim: speculative decoding makes copying much faster, and costs next to nothing when drafts are
rejected.

One engine runs the same requests alternately without and with speculation; numbers are medians over
repeats. `copy` and `calls`: requests to the built-in model whose answers repeat parts of the
prompt, drafted by `ngram`. `chat`: requests of all kinds that the model was trained on. `head`: the
same requests, drafted by an EAGLE-3 head that `sylvan train-draft` made (`--head`), with adaptation
and, as `head, all`, without. The other cases use an oracle, which knows the answers from the runs
without speculation and is right about each draft token with a given probability: `oracle` with
adaptation, `fixed` with all drafts in each step and none of them right, which measures the cost of
verification. Answers of both runs must be equal.

    python benchmarks/engine/bench_speculation.py [--model sapling|wide|0.5B] [--batch 1 32]
        [--what copy calls chat head oracle fixed] [--head DIR] [--chances 0 0.5 0.7 0.9]
        [--draft-tokens N] [--all] [--tokens 128] [--repeats 5] [--requests N] [--threads N]
        [--dtype bfloat16]

`wide` is the built-in model in the shape of `0.5B`: the same answers at the cost of the larger
model. `cpu_speedup` compares CPU time instead of wall time: if other programs use the machine, it
estimates, with `--threads 1`, what `speedup` would be on an idle one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sylvan.config.checkpoint import model_dir
from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.arrays import EMPTY_IDS, IntArray
from sylvan.protocol.messages import TokenOutput
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.core.req import Req
from sylvan.runtime.engine.build import build_scheduler
from sylvan.runtime.engine.engine_core import EngineCore
from sylvan.runtime.engine.text import load_tokenizer
from sylvan.runtime.features.speculation.api import Proposal
from sylvan.runtime.features.speculation.control import Speculation
from sylvan.runtime.features.speculation.head_control import HeadSpeculation
from sylvan.text.chat_template import ChatRequest, ChatTemplate

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.engine.wide_model import write_wide, write_wide_head
from tools.train.data.mix import CLASSES
from tools.train.draft_prompts import prompts

HALF_BILLION = json.loads((Path(__file__).parents[1] / "half_billion.json").read_text()) | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
}
KINDS = {"copy": ("copy",), "calls": ("tool_parallel",), "chat": CLASSES}
"""Kinds of requests to the built-in model: whose answers repeat parts of them, and of all kinds."""


class Oracle:
    """Implements `Drafter` with known answers; each token is right with a given probability."""

    def __init__(self, vocab_size: int) -> None:
        self.answers: dict[str, list[int]] = {}
        self.chance = 1.0
        self._vocab_size = vocab_size
        self._rng = random.Random(5)

    def propose(self, req: Req, most: int) -> Proposal:
        """See `Drafter.propose`."""
        coming = self.answers[req.rid][req.num_outputs : req.num_outputs + most]
        return Proposal(tuple(self._maybe(token) for token in coming))

    def forget(self, req: Req) -> None:
        """See `Drafter.forget`."""

    def _maybe(self, token: int) -> int:
        right = self._rng.random() < self.chance
        return token if right else (token + 1) % self._vocab_size


@dataclass
class Run:
    """One run: wall and CPU seconds after the first tokens, number of steps, and answers."""

    seconds: float
    cpu_seconds: float
    steps: int
    answers: dict[str, list[int]]


@dataclass
class Engine:
    """A scheduler with all its parts, and the outputs that it emitted."""

    built: EngineCore
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hooks = vars(self.built.scheduler._hooks)
        self._asked = {name: asked for name, asked in hooks.items() if isinstance(asked, tuple)}

    def switch(self, *, on: bool) -> None:
        """Switch speculation on or off in one engine, because two engines differ in memory
        placement.
        """
        hooks, own = self.built.scheduler._hooks, self.speculation
        for name, asked in self._asked.items():
            setattr(hooks, name, asked if on else tuple(c for c in asked if c is not own))

    def run(self, requests: Sequence[GenerateRequest], batch: int, *, on: bool) -> Run:
        """Answer all requests at once; times count from the first token of all of them."""
        self.switch(on=on)
        scheduler = self.built.scheduler
        self.tokens.clear()
        scheduler.flush_cache()
        seconds, cpu_seconds, steps = 0.0, 0.0, 0
        for first in range(0, len(requests), batch):
            for request in requests[first : first + batch]:
                scheduler.add(request)
            while any(not req.num_outputs for req in scheduler.running) or len(scheduler.waiting):
                scheduler.step()
            before, begun, worked = scheduler.load().steps, time.perf_counter(), time.process_time()
            while not scheduler.idle:
                scheduler.step()
            seconds += time.perf_counter() - begun
            cpu_seconds += time.process_time() - worked
            steps += scheduler.load().steps - before
        return Run(seconds, cpu_seconds, steps, dict(self.tokens))

    @property
    def speculation(self) -> Speculation | HeadSpeculation:
        """Its speculation capability."""
        every = self.built.scheduler._parts.capabilities
        return next(c for c in every if isinstance(c, Speculation | HeadSpeculation))


def start(model: str, drafted: int, options: dict[str, Any], **speculative: Any) -> Engine:
    """An engine that speculates."""
    told: dict[str, list[int]] = {}

    def emit(outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            told.setdefault(output.rid, []).extend(output.token_ids)

    keywords = {"model": model, "log_level": "warning", "overlap": "off"} | options
    keywords |= {"speculative_num_steps": drafted, **speculative}
    return Engine(build_scheduler(gather(from_keywords(keywords)).config, emit), told)


def requests(
    prompts: Sequence[IntArray], tokens: int, ends: tuple[int, ...] = ()
) -> list[GenerateRequest]:
    sampling = SamplingParams(
        max_new_tokens=tokens, temperature=0.0, ignore_eos=not ends, sampling_seed=0
    )
    return [
        GenerateRequest(
            rid=str(i), input_ids=ids, output_ids=EMPTY_IDS, sampling=sampling, eos_ids=ends
        )
        for i, ids in enumerate(prompts)
    ]


def compare(
    engine: Engine, asked: Sequence[GenerateRequest], batch: int, repeats: int
) -> dict[str, Any]:
    """Return tokens per second with and without speculation, interleaved; the first pair does not
    count.
    """
    ratios: list[float] = []
    cpu_ratios: list[float] = []
    rates: list[float] = []
    saved: list[float] = []
    before = engine.built.scheduler.load()
    for repeat in range(repeats + 1):
        plain, found = engine.run(asked, batch, on=False), engine.run(asked, batch, on=True)
        assert plain.answers == found.answers, "speculation changed an answer"
        generated = sum(len(answer) - 1 for answer in found.answers.values())
        saved.append(plain.steps / found.steps)
        if repeat:
            ratios.append(plain.seconds / found.seconds)
            cpu_ratios.append(plain.cpu_seconds / found.cpu_seconds)
            rates.append(generated / found.seconds)
    after = engine.built.scheduler.load()
    verified = after.verified_drafts - before.verified_drafts
    accepted = after.accepted_draft_tokens - before.accepted_draft_tokens
    ratios.sort()
    return {
        "speedup": round(statistics.median(ratios), 3),
        "from_to": [round(ratios[0], 3), round(ratios[-1], 3)],
        "cpu_speedup": round(statistics.median(cpu_ratios), 3),
        "tokens_a_second": round(statistics.median(rates), 1),
        "plain_steps_a_step": round(statistics.median(saved), 2),
        "accept_length": round(1 + accepted / verified, 2) if verified else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sapling")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--what", nargs="+", default=["copy", "calls", "oracle", "fixed"])
    parser.add_argument(
        "--all", action="store_true", help="verify all drafts, even if they do not pay off"
    )
    parser.add_argument("--requests", type=int, help="requests at batch size 1 (default: 32 or 63)")
    parser.add_argument("--threads", type=int, help="cores of a step (default: all)")
    parser.add_argument("--head", help="directory of a draft head, for `head`")
    parser.add_argument("--chances", type=float, nargs="+", default=[0.0, 0.5, 0.7, 0.9])
    parser.add_argument(
        "--draft-tokens", type=int, help="draft tokens per step (default: 10 for ngram, else 4)"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"dtype": args.dtype} if args.dtype != "auto" else {}
        options |= {"threads": args.threads} if args.threads else {}
        model = args.model
        if model == "0.5B":
            model = folder
            (Path(folder) / "config.json").write_text(json.dumps(HALF_BILLION))
            options |= {"load_format": "dummy"}
        elif model == "wide":
            model = str(write_wide(model_dir("sapling"), HALF_BILLION, Path(folder) / "model"))
            if args.head:
                wide_head = write_wide_head(Path(args.head), HALF_BILLION, Path(folder) / "head")
                args.head = str(wide_head)
        for what in args.what:
            measure(what, model, options, args)
    return 0


def measure(what: str, model: str, options: dict[str, Any], args: argparse.Namespace) -> None:
    if what == "head":
        for name in ("head", "head, all"):
            measure_head(name, model, options, args)
        return
    drafted = args.draft_tokens or (10 if what in KINDS else 4)
    engine = start(
        model,
        drafted,
        options,
        speculative_algorithm="NGRAM",
        **({"speculative.adaptive": False} if what == "fixed" or args.all else {}),
    )
    assert isinstance(engine.speculation, Speculation)
    vocab_size = int(engine.built.facts["vocab_size"] or 0)
    for batch in args.batch:
        if what in KINDS:
            count, seed = (63, 991) if what == "chat" else (32, 5)
            count = args.requests or count
            asked = requests(chats(max(count, batch), KINDS[what], seed), args.tokens, ends=(2,))
        else:
            asked = requests(noise(batch, args.prompt, vocab_size), args.tokens)
        chances = [None] if what in KINDS else [0.0] if what == "fixed" else args.chances
        for chance in chances:
            if chance is not None:
                oracle = Oracle(vocab_size)
                oracle.chance, oracle.answers = chance, engine.run(asked, batch, on=False).answers
                engine.speculation._drafter = oracle
            found = compare(engine, asked, batch, args.repeats)
            row = {"what": what, "batch": batch, "chance": chance, "draft_tokens": drafted} | found
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    engine.built.close()


def measure_head(what: str, model: str, options: dict[str, Any], args: argparse.Namespace) -> None:
    """Measure the chat mix, drafted by a head."""
    engine = start(
        model,
        args.draft_tokens or 4,
        options,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=args.head,
        **({"speculative.adaptive": False} if what != "head" else {}),
    )
    for batch in args.batch:
        count = args.requests or 63
        asked = requests(chats(max(count, batch), CLASSES, seed=991), args.tokens, ends=(2,))
        found = compare(engine, asked, batch, args.repeats)
        row = {"what": what, "batch": batch, "draft_tokens": args.draft_tokens or 4} | found
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    engine.built.close()


def chats(count: int, kinds: Sequence[str], seed: int = 5) -> list[IntArray]:
    """Requests of these kinds to the built-in model."""
    tokenizer = load_tokenizer(gather(from_keywords({"model": "sapling"})).config)
    chat, found = ChatTemplate(tokenizer), list[IntArray]()
    for prompt in prompts(seed, count, kinds):
        asked = ChatRequest(
            messages=prompt["messages"],
            tools=prompt.get("tools"),
            kwargs=prompt.get("chat_template_kwargs"),
        )
        found.append(np.array(chat.render(asked).input_ids, np.int32))
    return found


def noise(batch: int, length: int, vocab_size: int) -> list[IntArray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocab_size, length, np.int32) for _ in range(batch)]


if __name__ == "__main__":
    sys.exit(main())
