"""`sylvan replay`: play a flight recording of the scheduler back, without a model."""

from __future__ import annotations

from pathlib import Path

from sylvan.cli.main import DONE, FAILED, Spec
from sylvan.config.flags import Option, Parsed
from sylvan.protocol.errors import ConfigError

SPEC = Spec(
    usage="replay FOLDER [--until STEP]",
    doc="Feed what `sylvan serve --record FOLDER` wrote down to a new scheduler and compare its "
    "decisions with those recorded. Exit code 1, and the first difference, if they differ.",
    options=(Option("until", "Stop after so many steps.", metavar="STEP"),),
    tree=False,
)


def run(args: Parsed) -> int:
    """See `SPEC`."""
    from sylvan.runtime.sched.replay import replay  # help does not need numpy

    if not args.positions:
        raise ConfigError(f"FOLDER is missing; usage: sylvan {SPEC.usage}")
    until = args.options.get("until")
    if until is not None and not until.isdigit():
        raise ConfigError(f"--until is {until!r}; it is a number of steps")
    outcome = replay(Path(args.positions[0]), int(until) if until else None)
    counts = f"{outcome.steps} steps, {outcome.requests} requests, {outcome.tokens} tokens"
    if outcome.difference:
        print(f"differs after {counts}\n{outcome.difference}")
        return FAILED
    print(f"the same decisions: {counts}")
    return DONE
