"""Dispatches commands, and turns errors into messages and exit codes.

Exit codes: 0 success, 1 failure, 2 invalid command line or configuration, 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sylvan import __version__
from sylvan.cli.help import command_help
from sylvan.config.env import calm_threads
from sylvan.config.fields import nearest
from sylvan.config.flags import CONFIG_OPTIONS, HELP, Option, Parsed, parse_flags
from sylvan.config.schema import SERVE, Schema
from sylvan.protocol.errors import ConfigError, SylvanError
from sylvan.utils.revision import commit

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `module` defines `SPEC` and `run`; `doc` is its line in the list."""

    module: str
    doc: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """The command line of a command.

    Attributes:
        usage: What follows `sylvan`.
        doc: What it does, in a few sentences.
        options: Its own flags.
        tree: The configuration tree whose settings are flags too, if any.
        max_positions: Largest number of positional arguments.
    """

    usage: str
    doc: str
    options: tuple[Option, ...] = ()
    tree: Schema[Any] | None = SERVE
    max_positions: int = 1

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Return its own flags and the common ones."""
        return (*self.options, *(CONFIG_OPTIONS if self.tree else ()), HELP)


class CommandModule(Protocol):
    """The interface of a command's module."""

    SPEC: Spec

    def run(self, args: Parsed) -> int:
        """Run it; return the exit code. A `SylvanError` becomes a message."""
        ...


COMMANDS: Mapping[str, Command] = {
    "serve": Command("sylvan.cli.serve", "Serve a model over HTTP."),
    "route": Command("sylvan.cli.route", "Put one address in front of many servers."),
    "chat": Command("sylvan.cli.chat", "Talk to a model in the terminal."),
    "generate": Command("sylvan.cli.generate", "Continue a prompt and print the text."),
    "config": Command("sylvan.cli.config", "Show every setting: value, origin and reason."),
    "bench serve": Command("sylvan.cli.bench_serve", "Put a server under load and measure it."),
    "bench offline": Command("sylvan.cli.bench_offline", "Measure a model without a server."),
    "bench batch": Command("sylvan.cli.bench_batch", "Time the steps of single batches."),
    "bench compare": Command("sylvan.cli.bench_compare", "Compare two results of load tests."),
    "simulate fit": Command("sylvan.cli.simulate_fit", "Fit a simulation to a recorded server."),
    "simulate": Command("sylvan.cli.simulate", "Find how many servers a load needs."),
    "quantize": Command("sylvan.cli.quantize", "Write a checkpoint with 8-bit or 4-bit weights."),
    "eval": Command("sylvan.cli.evaluate", "Measure perplexity, and the loss of a weight format."),
    "train-draft": Command(
        "sylvan.cli.train_draft", "Train a draft head for speculative decoding."
    ),
    "lora": Command("sylvan.cli.lora", "Check a LoRA adapter, or merge it into its model."),
    "cache": Command("sylvan.cli.cache", "List, verify, prune, export or import a KV store."),
    "replay": Command("sylvan.cli.replay", "Replay a flight recording of the scheduler."),
    "check": Command("sylvan.cli.check", "Check this machine, or a model directory."),
    "doctor": Command("sylvan.cli.doctor", "Find what makes servers on this machine slow."),
    "health": Command("sylvan.cli.health", "Check whether a server is ready."),
}

EXAMPLES = """\
examples:
  sylvan serve                                   serve the built-in model on port 30000
  sylvan serve ~/models/Qwen3-0.6B --port 8000   serve a Hugging Face model directory
  sylvan chat                                    talk to the built-in model"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program name); return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    calm_threads()
    try:
        return _run(words)
    except ConfigError as error:
        return _complain(error, WRONG)
    except SylvanError as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        sys.stderr.close()
        return DONE


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return DONE
    if words[0] in ("--version", "-V", "version"):
        print(version())
        return DONE
    name, rest = " ".join(words[:2]), words[2:]
    if name not in COMMANDS:
        name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise ConfigError(
            f"there is no command {name!r}{nearest(name, COMMANDS)}; see sylvan --help"
        )
    module: CommandModule = importlib.import_module(COMMANDS[name].module)  # pyright: ignore[reportAssignmentType]
    spec = module.SPEC
    if {"-h", "--help"} & set(rest):
        print(command_help(spec.usage, spec.doc, spec.all_options, tree=spec.tree))
        return DONE
    args = parse_flags(rest, spec.all_options, tree=spec.tree)
    if len(args.positions) > spec.max_positions:
        extra = args.positions[spec.max_positions]
        raise ConfigError(f"unexpected argument {extra!r}; usage: sylvan {spec.usage}")
    return module.run(args)


def version() -> str:
    """Return the output of `sylvan --version`."""
    found = commit()
    return f"sylvan {__version__}" + (f" (commit {found})" if found else "")


def overview() -> str:
    """Return the output of `sylvan` without arguments."""
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(f"  {name:{width}}  {c.doc}" for name, c in COMMANDS.items())
    return (
        "Sylvan serves language models, and programs them.\n\n"
        "usage: sylvan COMMAND [flags]\n\n"
        f"commands:\n{commands}\n\n{EXAMPLES}\n\n"
        "`sylvan COMMAND --help` lists its flags; `sylvan --version` prints the version."
    )


def _complain(error: SylvanError, code: int) -> int:
    lines = str(error).splitlines() or [type(error).__name__]
    print(f"sylvan: error: {lines[0]}", file=sys.stderr)
    for line in lines[1:]:
        print(f"               {line}", file=sys.stderr)
    return code
