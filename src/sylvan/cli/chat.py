"""`sylvan chat`: chats in the terminal."""

from __future__ import annotations

from sylvan.cli.main import DONE, Spec
from sylvan.cli.settings import CLIENT_OPTIONS
from sylvan.config.flags import Option, Parsed

SPEC = Spec(
    usage="chat [MODEL] [flags]",
    doc="Talk to a model. Starts it for this conversation, unless --url names a server. Ctrl-C "
    "ends an answer; /help lists the commands.",
    options=(
        Option("system", "System message before the conversation.", metavar="TEXT"),
        *CLIENT_OPTIONS,
    ),
)


def run(args: Parsed) -> int:
    from rich.console import Console  # `--help` needs neither rich nor httpx

    from sylvan.cli.conversation import ChatHistory, read_line
    from sylvan.cli.local import connect

    console = Console(highlight=False, soft_wrap=True)
    with connect(args, position="model") as client:
        model = client.model()
        console.print(f"[dim]{model}; /help lists commands, /quit ends[/dim]")
        talk = ChatHistory(client, console, model, args.options.get("system", ""))
        while talk.turn(read_line(console)):
            pass
    return DONE
