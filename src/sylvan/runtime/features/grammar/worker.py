"""Worker half of grammars: masks before a token is drawn, the next state right after."""

from __future__ import annotations

from typing import ClassVar

from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.features.grammar.data import Matchers
from sylvan.runtime.sampling.constraints import Constraints


class GrammarWorker(CapabilityWorker):
    """Constrains outputs by `Matchers`."""

    name: ClassVar = "grammar"

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers

    @property
    def constraints(self) -> Constraints:
        """See `CapabilityWorker.constraints`."""
        return self._matchers

    def close(self) -> None:
        """See `CapabilityWorker.close`."""
        self._matchers.close()
