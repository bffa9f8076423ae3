"""`sylvan generate`: generates from one prompt."""

from __future__ import annotations

import sys

from sylvan.cli.main import DONE, Spec
from sylvan.cli.settings import CLIENT_OPTIONS
from sylvan.config.flags import Option, Parsed
from sylvan.protocol.errors import ConfigError

SPEC = Spec(
    usage="generate PROMPT [flags]",
    doc="Continue PROMPT and print the text as it is generated. PROMPT may be `-` for standard "
    "input. Starts the model for this one text, unless --url names a server.",
    options=(
        Option("chat", "Send PROMPT as a user message instead of continuing it."),
        Option("max_tokens", "Stop after this many tokens (default: 128).", metavar="N"),
        Option("temperature", "0 always takes the most likely token (default: 0).", metavar="T"),
        Option(
            "top_p", "Sample among the most likely tokens with this total probability.", metavar="P"
        ),
        Option("stop", "Stop at this text.", metavar="TEXT"),
        *CLIENT_OPTIONS,
    ),
)


def run(args: Parsed) -> int:
    from sylvan.cli.local import connect  # `--help` needs no httpx

    if not args.positions:
        raise ConfigError(f"PROMPT is missing; usage: sylvan {SPEC.usage}")
    prompt = sys.stdin.read() if args.positions[0] == "-" else args.positions[0]
    fields = request_fields(args)
    with connect(args, position=None) as client:
        fields["model"] = client.model()
        if args.has("chat"):
            pieces = client.chat([{"role": "user", "content": prompt}], **fields)
        else:
            pieces = client.complete(prompt, **fields)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    return DONE


def request_fields(args: Parsed) -> dict[str, object]:
    """Return the request fields given on the command line.

    Raises:
        ConfigError: A value is not a number.
    """
    fields: dict[str, object] = {"max_tokens": 128, "temperature": 0.0}
    kinds = {"max_tokens": int, "temperature": float, "top_p": float, "stop": str}
    for name, kind in kinds.items():
        if name not in args.options:
            continue
        text = args.options[name]
        try:
            fields[name] = kind(text)
        except ValueError as error:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: expected a number, got {text!r}") from error
    return fields
