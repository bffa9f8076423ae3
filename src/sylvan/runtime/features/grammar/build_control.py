"""Builds the grammar capability, except its worker half, which loads torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sylvan.config.tree import GrammarConfig
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.core.req import Req
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.cache import GrammarStore, store_folder
from sylvan.runtime.features.grammar.compiler.client import (
    CompilerSetup,
    CompilerStats,
    GrammarCompiler,
)
from sylvan.runtime.features.grammar.control import GrammarControl
from sylvan.runtime.features.grammar.libraries import library_version
from sylvan.runtime.features.grammar.limits import Limits
from sylvan.runtime.features.grammar.loaders import Loaders
from sylvan.runtime.features.grammar.matchers import Matchers
from sylvan.runtime.features.grammar.spec import spec_of
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.runtime.sched.capability import Capability, Verdict


@dataclass(frozen=True, slots=True)
class GrammarParts:
    """The capability without its worker half.

    Attributes:
        control: The control half.
        matchers: Of the worker half.
        grammars: By request ID; filled by the worker half, read by `matchers`.
        loaders: Creates what loads compiled grammars.
        loaded: Returns grammars that this process has already loaded, by digest.
        stats: Counts of the compiler.
        counts: The fields of `SchedulerLoad`.
        close: Ends the compiler.
    """

    control: Capability
    matchers: Matchers
    grammars: dict[str, CompiledGrammar | str]
    loaders: Callable[[], Loaders]
    loaded: Callable[[str], CompiledGrammar | None] = lambda digest: None
    stats: Callable[[], CompilerStats] = CompilerStats
    counts: Callable[[], Mapping[str, int | float]] = dict
    close: Callable[[], None] = lambda: None


def grammar_parts(
    config: GrammarConfig,
    read_vocabulary: Callable[[], Vocabulary],
    vocab_size: int,
    *,
    free_core: bool = False,
) -> GrammarParts:
    """Build the parts; nothing is loaded or started before the first grammar request.

    Args:
        config: Resolved; not `auto`.
        read_vocabulary: Reads the model's vocabulary; called in another thread.
        vocab_size: Number of IDs in the model's logits.
        free_core: Whether a core is idle during the forward pass; see `overlap`.
    """
    name = config.backend

    @functools.cache
    def vocabulary() -> Vocabulary:
        found = read_vocabulary()
        if not found.eos_ids:
            raise ConfigError("the tokenizer has no token that ends an output; grammars need one")
        return found

    def loaders() -> Loaders:
        return Loaders(vocabulary(), limits)

    limits = Limits(timeout_s=config.compile_timeout_s, max_states=config.max_states)
    grammars: dict[str, CompiledGrammar | str] = {}
    jumps = config.jump_forward and name != "none"
    matchers = Matchers(grammars, vocabulary, vocab_size, jumps=jumps, free_core=free_core)
    if name == "none":  # thinking budgets need no library
        return GrammarParts(NoGrammar(), matchers, grammars, loaders)

    def setup() -> CompilerSetup:
        return CompilerSetup(loaders(), _store(config, name, vocabulary()))

    compiler = GrammarCompiler(name, setup, limits)
    control = GrammarControl(compiler)

    def counts() -> Mapping[str, int | float]:
        stats = compiler.stats
        hits = stats.cache_hits + stats.disk_hits
        return {
            **control.counts(),
            "grammars": stats.compiled + stats.refused + hits,
            "grammar_cache_hits": hits,
            "grammars_refused": stats.refused,
            "grammar_timeouts": stats.timeouts,
            "grammar_seconds": stats.compile_s,
        }

    return GrammarParts(
        control,
        matchers,
        grammars,
        loaders,
        control.loaded,
        stats=lambda: compiler.stats,
        counts=counts,
        close=compiler.close,
    )


class NoGrammar(Capability):
    """Rejects requests with a grammar."""

    def gate(self, req: Req) -> Verdict:
        spec = spec_of(req.request)
        if spec is not None:
            message = f"{spec.kind} cannot be honoured: this server runs with grammar.backend none"
            raise RequestError(message, param=spec.kind)
        return Verdict.READY


def _store(config: GrammarConfig, name: str, vocabulary: Vocabulary) -> GrammarStore | None:
    if config.cache_dir is None:
        return None
    root = Path(config.cache_dir).expanduser()
    return GrammarStore(store_folder(root, library_version(name), vocabulary))
