"""Builds both halves from the configuration."""

from __future__ import annotations

from collections.abc import Callable

from sylvan.config.tree import PdMuxConfig
from sylvan.kernels.api import Unsupported
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ModelContext
from sylvan.runtime.features.pdmux.control import PrefillBetween
from sylvan.runtime.features.pdmux.worker import InterleavedPrefillWorker
from sylvan.runtime.sched.capability import Capability


class PdMuxParts:
    """Both halves: first `workers`, then, once the executor exists, `controls`.

    Args:
        settings: None: off; there are no parts.
    """

    def __init__(self, settings: PdMuxConfig | None) -> None:
        self._settings = settings
        self._worker: InterleavedPrefillWorker | None = None
        self._model_context: ModelContext | None = None

    @property
    def workers(self) -> tuple[Callable[[ModelContext], CapabilityWorker], ...]:
        """Return the factory of the worker half."""
        return (self._make,) if self._settings is not None else ()

    def _make(self, context: ModelContext) -> CapabilityWorker:
        assert self._settings is not None
        self._model_context = context
        self._worker = InterleavedPrefillWorker(context.split, self._settings.wait_ms / 1000)
        return self._worker

    def controls(self, *, may_transfer: bool) -> tuple[Capability, ...]:
        """Build the control half.

        Args:
            may_transfer: See `PrefillBetween`.

        Raises:
            ConfigError: The model cannot be computed op by op.
        """
        if self._settings is None or self._worker is None or self._model_context is None:
            return ()
        groups, _ = self._model_context.memory()
        kinds = {group.kind for group in groups}
        if not kinds <= {"full", "latent"}:
            raise ConfigError(
                f"pdmux: this model keeps {', '.join(sorted(kinds))} layers; only prompts of "
                "models with full attention in all layers can be computed between steps"
            )
        try:
            self._worker.open()
        except Unsupported as why:
            raise ConfigError(f"pdmux: prompts cannot be computed op by op: {why}") from None
        least, page_size = self._settings.min_tokens, groups[0].page_size
        return (PrefillBetween(least, page_size, may_transfer=may_transfer),)
