"""Worker halves of the capabilities of every server, as far as its model needs them."""

from __future__ import annotations

from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ModelSite
from sylvan.runtime.features.embeddings.pooling import Pooler
from sylvan.runtime.features.embeddings.worker import EmbeddingsWorker
from sylvan.runtime.features.prompt_logprobs.worker import PromptLogprobsWorker
from sylvan.runtime.features.recurrent.worker import RecurrentStatesWorker


def _recurrent(site: ModelSite) -> CapabilityWorker | None:
    return RecurrentStatesWorker() if site.has_states else None


def _prompt_logprobs(site: ModelSite) -> CapabilityWorker | None:
    del site
    return PromptLogprobsWorker()


def _embeddings(site: ModelSite) -> CapabilityWorker | None:
    if site.pooling is None:
        return None
    return EmbeddingsWorker(Pooler(site.pooling, labels=site.labels, head=site.head))


STANDARD_WORKERS = (_recurrent, _prompt_logprobs, _embeddings)
"""Build the worker halves, in the order of their hooks."""
