"""`sylvan replay`: replays a flight recording of the scheduler, without a model."""

from __future__ import annotations

from pathlib import Path

from sylvan.cli.main import DONE, FAILED, Spec
from sylvan.config.flags import Option, Parsed
from sylvan.protocol.errors import ConfigError

SPEC = Spec(
    usage="replay FOLDER [--run N] [--until STEP]",
    doc="Feed the inputs that `sylvan serve --record FOLDER` recorded to a new scheduler, and "
    "compare its decisions with the recorded ones; if the scheduler was restarted, each run is "
    "replayed separately. If a decision differs, print the first difference and exit with code 1.",
    options=(
        Option("run", "Replay only this run of the scheduler; the first is 1.", metavar="N"),
        Option("until", "Stop each run after STEP steps.", metavar="STEP"),
    ),
    tree=None,
)


def run(args: Parsed) -> int:
    # `--help` needs no numpy
    from sylvan.runtime.features.flight_recorder.recording import RUN_PREFIX, runs
    from sylvan.runtime.features.flight_recorder.replay import replay

    if not args.positions:
        raise ConfigError(f"FOLDER is missing; usage: sylvan {SPEC.usage}")
    number, until = _number(args, "run"), _number(args, "until")
    found = runs(Path(args.positions[0]))
    name = f"{RUN_PREFIX}{number}"
    chosen = [folder for folder in found if number is None or folder.name == name]
    if not chosen:
        names = ", ".join(folder.name for folder in found)
        raise ConfigError(f"--run is {number}; {args.positions[0]} holds {names}")
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
