"""`sylvan train-draft`: trains a draft head or a context tree for a model."""

from __future__ import annotations

from pathlib import Path

from sylvan.cli.main import DONE, Spec
from sylvan.config.flags import Option, Parsed
from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.errors import ConfigError

SPEC = Spec(
    usage="train-draft MODEL DATA [--out DIR] [--steps 2000]",
    doc="Train an EAGLE-3 head for the model directory MODEL from its own answers to the prompts "
    "in DATA, or with --algorithm ngram build a tree of its most frequent continuations. DATA "
    'is a JSONL file whose lines are {"messages": [...]} or {"prompt": "..."}, or a text '
    "file with a user message per line. An interrupted run continues when called the same way "
    "again. At the end, the accept length on held-out prompts is printed.",
    options=(
        Option("out", "Directory of the head (default: MODEL-eagle3 here).", metavar="DIR"),
        Option("algorithm", "eagle3 or ngram (default: eagle3).", metavar="NAME"),
        Option("prompts", "Maximum number of prompts (default: 10000).", metavar="N"),
        Option("answer_tokens", "Maximum tokens of an answer (default: 256).", metavar="N"),
        Option("words", "Size of the draft vocabulary (default: 32000).", metavar="N"),
        Option("steps", "Number of batches (default: 2000).", metavar="N"),
        Option("batch_tokens", "Tokens per batch (default: 2048).", metavar="N"),
        Option("depth", "Number of consecutive draft tokens to train (default: 4).", metavar="N"),
        Option("rate", "Maximum learning rate (default: 0.001).", metavar="X"),
        Option("context_tokens", "Maximum context of a tree in tokens (default: 16).", metavar="N"),
        Option("least", "Omit contexts that are less frequent (default: 1).", metavar="N"),
        Option("threads", "Number of CPU cores (default: all).", metavar="N"),
    ),
    tree=None,
    max_positions=2,
)

_LIMITS = {
    "prompts": (10_000, 10_000_000),
    "answer_tokens": (256, 1 << 20),
    "words": (32_000, 4_000_000),
    "steps": (2000, 10_000_000),
    "batch_tokens": (2048, 1 << 24),
    "depth": (4, 16),
    "context_tokens": (16, 64),
    "least": (1, 1_000_000),
    "threads": (0, 1024),
}
"""Default and largest value of the integer options."""


def run(args: Parsed) -> int:
    if len(args.positions) != SPEC.max_positions:
        raise ConfigError(f"MODEL and DATA are needed; usage: sylvan {SPEC.usage}")
    model, data = args.positions[0], Path(args.positions[1]).expanduser()
    algorithm = args.options.get("algorithm", "eagle3")
    if algorithm not in ("eagle3", "ngram"):
        raise ConfigError(f"--algorithm: expected eagle3 or ngram, not {algorithm!r}")
    sizes = {name: _number(args, name) for name in _LIMITS}
    out = Path(args.options.get("out", f"{Path(model).name}-{algorithm}")).expanduser()
    keywords = {"model": model, "log_level": "warning"}
    threads = {"threads": sizes["threads"]} if sizes["threads"] else {}
    config = gather(from_keywords(keywords | threads)).config
    from sylvan.training.loop import Schedule  # imports torch
    from sylvan.training.train import DraftTrainOptions, train_contexts, train_draft

    schedule = Schedule(
        steps=sizes["steps"],
        batch_tokens=sizes["batch_tokens"],
        depth=sizes["depth"],
        learning_rate=_rate(args),
    )
    options = DraftTrainOptions(
        prompts=sizes["prompts"],
        answer_tokens=sizes["answer_tokens"],
        draft_vocab=sizes["words"],
        context_tokens=sizes["context_tokens"],
        min_count=sizes["least"],
        schedule=schedule,
    )
    train = train_draft if algorithm == "eagle3" else train_contexts
    found = train(config, data, out, options, lambda line: print(line, flush=True))
    print(
        f"{out}: accept length {found.accept_length:.2f}, {100 * found.accept_rate:.0f} % of "
        f"draft tokens right over {found.tokens} tokens\n\n  sylvan serve {model} "
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {out}"
    )
    return DONE


def _number(args: Parsed, name: str) -> int:
    default, most = _LIMITS[name]
    text = args.options.get(name, str(default))
    if not text.isdecimal() or not min(default, 1) <= int(text) <= most:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag}: expected a number in 1..{most}, not {text!r}")
    return int(text)


def _rate(args: Parsed) -> float:
    text = args.options.get("rate", "0.001")
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1:
        raise ConfigError(f"--rate: expected a number above 0 and up to 1, not {text!r}")
    return rate
