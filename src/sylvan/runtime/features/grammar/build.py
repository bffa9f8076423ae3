"""Builds the grammar capability."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sylvan.config.tree import GrammarConfig
from sylvan.runtime.features.grammar.build_control import GrammarParts, grammar_parts
from sylvan.runtime.features.grammar.compiler.client import CompilerStats
from sylvan.runtime.features.grammar.vocabulary import Vocabulary
from sylvan.runtime.features.grammar.worker import GrammarWorker
from sylvan.runtime.sched.capability import Capability


@dataclass(frozen=True, slots=True)
class Grammar:
    """The capability: its control half, and the worker half used by the sampler."""

    control: Capability
    worker: GrammarWorker
    stats: Callable[[], CompilerStats]
    close: Callable[[], None]
    counts: Callable[[], Mapping[str, int | float]] = dict


def build_grammar(
    config: GrammarConfig,
    read_vocabulary: Callable[[], Vocabulary],
    vocab_size: int,
    *,
    free_core: bool = False,
) -> Grammar:
    """Build the capability; see `grammar_parts`."""
    return with_worker(grammar_parts(config, read_vocabulary, vocab_size, free_core=free_core))


def with_worker(parts: GrammarParts) -> Grammar:
    """Build the worker half."""
    worker = GrammarWorker(parts.matchers, parts.grammars, parts.loaders, parts.loaded)

    def close() -> None:
        parts.close()
        worker.close()

    return Grammar(parts.control, worker, parts.stats, close, counts=parts.counts)
