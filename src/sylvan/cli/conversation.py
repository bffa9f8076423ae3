"""A conversation with a model: its turns, and commands."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from sylvan.cli.client import ApiClient, ServerError

HELP = """\
/reset         forget the conversation
/system TEXT   set the instructions, and forget the conversation
/save FILE     write the conversation as JSON
/quit          end (so does the end of input)"""


@dataclass(slots=True)
class ChatHistory:
    """The history. `messages` alternate between user and assistant."""

    client: ApiClient
    console: Console
    model: str
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def turn(self, line: str | None) -> bool:
        """Process one line of input (None: end of input); False to quit."""
        if line is None or line.strip() in ("/quit", "/exit"):
            return False
        if line.startswith("/"):
            self._command(*line.strip().partition(" ")[::2])
        elif line.strip():
            self._ask(line)
        return True

    def _command(self, name: str, rest: str) -> None:
        match name:
            case "/reset":
                self.messages.clear()
                self._say("forgotten")
            case "/system":
                self.system = rest
                self.messages.clear()
                self._say("set")
            case "/save" if rest:
                self._save(Path(rest).expanduser())
            case _:
                self._say(HELP)

    def _ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self.client.chat(self._prompt(), model=self.model):
                answer += piece
                self.console.print(piece, end="", markup=False)
        except KeyboardInterrupt:
            self._say(" (stopped)")
        except ServerError as error:
            self.messages.pop()
            self.console.print(f"[red]{error}[/red]")
            return
        self.console.print()
        self.messages.append({"role": "assistant", "content": answer})

    def _prompt(self) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.messages

    def _save(self, path: Path) -> None:
        try:
            path.write_text(json.dumps(self._prompt(), indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            self._say(f"cannot write {path}: {error.strerror}")
        else:
            self._say(f"saved {len(self.messages)} messages to {path}")

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)


def read_line(console: Console) -> str | None:
    """Read a line of input; None at the end or on Ctrl-C."""
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401 - gives input() history and editing

            return console.input("[bold green]> [/bold green]")
        return input()
    except (EOFError, KeyboardInterrupt):
        return None
