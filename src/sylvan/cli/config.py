"""`sylvan config`: shows every setting with its value, its origin, and the reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import msgspec

from sylvan.cli.help import markdown
from sylvan.cli.main import DONE, Spec
from sylvan.cli.settings import Settings, load_settings, resolve_settings
from sylvan.config.fields import fields, get, sections, size_text
from sylvan.config.flags import Option, Parsed
from sylvan.config.load import dump
from sylvan.config.values import Secret

SPEC = Spec(
    usage="config [MODEL] [flags]",
    doc="Show what `sylvan serve` would run with the same flags: value, origin and reason of every "
    "setting. Loads no weights.",
    options=(
        Option("json", "Print one JSON object per setting, in a list."),
        Option("yaml", "Print a file for --config with all given values."),
        Option("markdown", "Print the reference of all settings."),
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One setting, for display."""

    path: str
    value: object
    origin: str
    reason: str


def run(args: Parsed) -> int:
    if args.has("markdown"):
        print(markdown(), end="")
        return DONE
    loaded = load_settings(args)
    if args.has("yaml"):
        print(_yaml(dump(loaded.config, defaults=False)), end="")
        return DONE
    settings = resolve_settings(loaded)
    rows = list(explain(settings))
    if args.has("json"):
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return DONE
    print(table(rows))
    print(f"\nmemory: {settings.resolved.plan.describe()}")
    for note in loaded.notes:
        print(f"note: {note}")
    return DONE


def explain(settings: Settings) -> Iterable[Row]:
    """Return all settings, in tree order."""
    config, given = settings.resolved.config, settings.loaded.given
    for path in fields():
        section = path.rpartition(".")[0]
        if section and sections()[section].optional and get(config, section) is None:
            continue
        value = shown(get(config, path))
        decision = settings.resolved.decisions.get(path)
        if decision:
            yield Row(path, value, "auto", decision.reason)
        elif path in given:
            yield Row(path, value, given[path].origin, given[path].spelled)
        else:
            yield Row(path, value, "default", "")


def shown(value: object) -> object:
    """Return a value as plain data, without secrets."""
    return str(value) if isinstance(value, Secret) else msgspec.to_builtins(value)


def table(rows: Sequence[Row]) -> str:
    """Format aligned columns."""
    cells = [(row.path, _text(row), row.origin, row.reason) for row in rows]
    cells.insert(0, ("setting", "value", "origin", "reason"))
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    lines = ("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in cells)
    return "\n".join(lines)


def _text(row: Row) -> str:
    if isinstance(row.value, bool):
        return str(row.value).lower()
    if row.path in ("cache.memory", "server.max_body_bytes") and isinstance(row.value, int):
        return size_text(row.value)
    if row.value is None:
        return "none"
    return str(row.value) if not isinstance(row.value, (list, dict)) else json.dumps(row.value)


def _yaml(tree: dict[str, object]) -> str:
    import yaml  # other output formats do not need it

    return yaml.safe_dump(tree, sort_keys=False) if tree else "{}\n"
