"""Builds the capability from the configuration."""

from __future__ import annotations

from sylvan.config.tree import DRAFT_HEADS, OWN_HEAD, SpeculativeConfig
from sylvan.runtime.features.speculation.contexts import ContextTree
from sylvan.runtime.features.speculation.control import Speculation
from sylvan.runtime.features.speculation.corpus import GivenCorpora, TenantCorpora
from sylvan.runtime.features.speculation.draft_model import DraftModel
from sylvan.runtime.features.speculation.head_control import HeadSpeculation
from sylvan.runtime.features.speculation.head_work import CHAIN, TreeShape
from sylvan.runtime.features.speculation.model_control import ModelSpeculation
from sylvan.runtime.features.speculation.ngram import NgramDrafter

AnySpeculation = Speculation | ModelSpeculation | HeadSpeculation


def tree_shape(config: SpeculativeConfig) -> TreeShape:
    """Return the tree shape of a resolved section."""
    if config.topk == 1:
        return CHAIN
    assert isinstance(config.topk, int), "a resolved section has no auto"
    assert isinstance(config.num_draft_tokens, int), "a resolved section has no auto"
    return TreeShape(config.topk, config.num_draft_tokens - 1)


def build_speculation(
    config: SpeculativeConfig,
    vocab_size: int,
    model: DraftModel | None,
    given: GivenCorpora | None = None,
    contexts: ContextTree | None = None,
) -> AnySpeculation:
    """Build the control half from a resolved section.

    Args:
        config: The section.
        vocab_size: Vocabulary of the served model.
        model: Draft model, for algorithms that have one.
        given: Corpora that `ngram` searches for all requests.
        contexts: Context tree from which `ngram` drafts the model's usual continuations.
    """
    limit = config.num_steps
    assert isinstance(limit, int), "a resolved section has no auto"
    if config.algorithm in (*DRAFT_HEADS, OWN_HEAD):
        shape = tree_shape(config)
        return HeadSpeculation(limit, vocab_size, adaptive=config.adaptive, shape=shape)
    if model is not None:
        return ModelSpeculation(model, limit, vocab_size, adaptive=config.adaptive)
    shared = TenantCorpora(config.shared_tokens) if config.shared_tokens else None
    return Speculation(
        NgramDrafter(config.min_match, config.max_match, shared, given, contexts),
        limit,
        vocab_size,
        adaptive=config.adaptive,
    )
