"""Resolves and checks the configuration of a parsed command line."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.checkpoints.remote import is_remote
from sylvan.cli.progress import fetching
from sylvan.config.check import check
from sylvan.config.checkpoint import fetched
from sylvan.config.flags import Option, Parsed
from sylvan.config.load import LoadedConfig, Setting
from sylvan.config.resolve import Resolved, resolve
from sylvan.config.sources import SourceSettings, combined, gather

CLIENT_OPTIONS = (
    Option("url", "Use a server that runs already.", metavar="URL"),
    Option("key", "API key of the server at --url.", metavar="KEY"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The given settings, and the resolved ones."""

    loaded: LoadedConfig
    resolved: Resolved


def load_settings(args: Parsed, *, position: str | None = "model") -> LoadedConfig:
    """Read all configuration sources.

    Args:
        args: The command line.
        position: Path of the setting that the first positional argument sets, if any.

    Raises:
        ConfigError: A setting is unknown, malformed or contradictory.
    """
    given = args.given
    if position and args.positions:
        word = Setting(position, args.positions[0], "flag", f"argument {args.positions[0]!r}")
        given = combined([given, SourceSettings((word,))])
    return gather(given, file=args.options.get("config"), preset=args.options.get("preset"))


def resolve_settings(loaded: LoadedConfig) -> Settings:
    """Resolve `auto`, and check all settings.

    Raises:
        ConfigError: The model does not exist, or settings conflict.
    """
    from sylvan.runtime.engine.facts import gather_facts  # `--help` needs no numpy

    fetch_models(loaded.config.model, loaded.config.tokenizer)
    facts = gather_facts(loaded.config).shared_by(loaded.config.server.replicas)
    resolved = resolve(loaded.config, facts)
    check(resolved, facts)
    return Settings(loaded, resolved)


def fetch_models(*models: str | None) -> None:
    """Copy remote models into the cache, showing progress.

    Raises:
        ConfigError: A model cannot be fetched.
    """
    for model in models:
        if model is not None and is_remote(model):
            with fetching(f"fetching {model}") as progress:
                fetched(model, progress)
