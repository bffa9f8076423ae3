"""Interface of steps that run forward pass and sampling in one call."""

from __future__ import annotations

from typing import Protocol

import torch

from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.sampling.constraints import Masks
from sylvan.runtime.sampling.output import SampleOutput


class FusedStep(Protocol):
    """Runs plans one after another and fills its inputs itself."""

    def run(self, plan: StepPlan, *, draw: bool, masks: Masks | None = None) -> SampleOutput | None:
        """Compute all rows and store their KV.

        Returns: the sampled tokens with `draw`; else None, and `logits` returns the logits.
        """
        ...

    def logits(self) -> torch.Tensor:
        """Logits of the sampled rows, float32 (S, V), after a run without `draw`; overwritable."""
        ...
