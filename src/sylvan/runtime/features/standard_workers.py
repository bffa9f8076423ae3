"""Worker halves of the capabilities of every server, as far as its model needs them."""

from __future__ import annotations

from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ModelContext
from sylvan.runtime.features.embeddings.pooling import Pooler
from sylvan.runtime.features.embeddings.worker import EmbeddingsWorker
from sylvan.runtime.features.prompt_logprobs.worker import PromptLogprobsWorker
from sylvan.runtime.features.recurrent.worker import RecurrentStatesWorker


def _recurrent(context: ModelContext) -> CapabilityWorker | None:
    return RecurrentStatesWorker() if context.has_states else None


def _prompt_logprobs(context: ModelContext) -> CapabilityWorker | None:
    del context
    return PromptLogprobsWorker()


def _embeddings(context: ModelContext) -> CapabilityWorker | None:
    if context.pooling is None:
        return None
    return EmbeddingsWorker(Pooler(context.pooling, labels=context.labels, head=context.head))


STANDARD_WORKERS = (_recurrent, _prompt_logprobs, _embeddings)
"""Build the worker halves, in the order of their hooks."""
