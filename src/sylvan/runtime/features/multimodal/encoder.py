"""Vectors of images, videos and sounds, by the encoder that a checkpoint brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from sylvan.protocol.media import MediaKind


class MediaEncoder(Protocol):
    """Runs alone for each item, so that its vectors do not depend on what else is served."""

    def encode(self, kind: MediaKind, features: Mapping[str, np.ndarray]) -> Sequence[torch.Tensor]:
        """Vectors for the placeholders of one item, in order.

        Args:
            kind: Of the item.
            features: The encoder's inputs by name, as the checkpoint's processor makes them.

        Returns: (N, D) of any float type: for the embeddings, then for each layer whose output has
            vectors added (`MediaConfig.edited_layers`).
        """
        ...
