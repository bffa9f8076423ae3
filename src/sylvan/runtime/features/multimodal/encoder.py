"""The interface of a checkpoint's encoder of images, videos and audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from sylvan.protocol.media import MediaKind


class MediaEncoder(Protocol):
    """Encodes each item alone, so that its embeddings do not depend on other requests."""

    def encode(self, kind: MediaKind, features: Mapping[str, np.ndarray]) -> Sequence[torch.Tensor]:
        """Return the embeddings for one item's placeholders, in order.

        Args:
            kind: Kind of the item.
            features: The encoder's inputs by name, as the checkpoint's processor creates them.

        Returns: (N, D) of any float type: for the input embeddings, then for each layer that adds
            embeddings to its output (`MediaConfig.edited_layers`).
        """
        ...
