"""`sylvan replay`: replays a flight recording of the scheduler, without a model."""

from __future__ import annotations

from pathlib import Path

from sylvan.cli.main import DONE, FAILED, Spec
from sylvan.config.flags import Option, Parsed
from sylvan.protocol.errors import ConfigError

SPEC = Spec(
    usage="replay FOLDER [--life N] [--until STEP]",
    doc="Feed what `sylvan serve --record FOLDER` wrote down to a new scheduler and compare its "
    "decisions with those recorded; each life of a scheduler that was started again is replayed "
    "by itself. Exit code 1, and the first difference, if they differ.",
    options=(
        Option("life", "Replay only this life of the scheduler; the first is 1.", metavar="N"),
        Option("until", "Stop each life after so many steps.", metavar="STEP"),
    ),
    tree=None,
)


def run(args: Parsed) -> int:
    from sylvan.runtime.features.flight_recorder.recording import (
        LIFE,
        lives,
    )  # `--help` needs no numpy
    from sylvan.runtime.features.flight_recorder.replay import replay

    if not args.positions:
        raise ConfigError(f"FOLDER is missing; usage: sylvan {SPEC.usage}")
    life, until = _number(args, "life"), _number(args, "until")
    found = lives(Path(args.positions[0]))
    chosen = [folder for folder in found if life is None or folder.name == f"{LIFE}{life}"]
    if not chosen:
        names = ", ".join(folder.name for folder in found)
        raise ConfigError(f"--life is {life}; {args.positions[0]} holds {names}")
    same = True
    for folder in chosen:
        outcome = replay(folder, until)
        print(f"{folder.name}{outcome}")
        same = same and not outcome.difference
    return DONE if same else FAILED


def _number(args: Parsed, name: str) -> int | None:
    text = args.options.get(name)
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--{name} is {text!r}; it is a number from 1")
    return int(text)
