"""Control halves of the capabilities of every server, as far as its model needs them."""

from __future__ import annotations

from sylvan.runtime.cache.by_rank import KVMemory
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.features.embeddings.control import EmbeddingCapability, NoEmbeddings
from sylvan.runtime.features.prompt_logprobs.control import PromptLogprobsCapability
from sylvan.runtime.features.recurrent.control import RecurrentStates
from sylvan.runtime.sched.capability import Capability


def standard_capabilities(
    cache: KVMemory, *, makes_vectors: bool = False, pools_all: bool = False
) -> tuple[Capability, ...]:
    """Build the control halves.

    Args:
        cache: Prefix cache of the scheduler.
        makes_vectors: Whether the model serves `EmbedRequest`.
        pools_all: Whether pooling uses all tokens.
    """
    embeddings = EmbeddingCapability(pools_all=pools_all) if makes_vectors else NoEmbeddings()
    found: list[Capability] = [PromptLogprobsCapability(), embeddings]
    if isinstance(cache, KVCacheManager) and cache.states is not None:
        found.append(RecurrentStates(cache, cache.states))
    return tuple(found)
