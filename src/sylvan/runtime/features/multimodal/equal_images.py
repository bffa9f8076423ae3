"""Encodes equal images of an item once.

A small image is its own only tile, and frames of a video repeat while nothing moves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

TOWERS = frozenset({"clip_vision_model", "siglip_vision_model"})
"""Model types of towers that encode each image of a batch alone."""


def encode_equal_images_once(model: nn.Module) -> int:
    """Let each tower of `TOWERS` run on distinct images only; return their number."""
    inside: set[int] = set()
    count = 0
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if id(module) in inside or getattr(config, "model_type", None) not in TOWERS:
            continue
        inside.update(map(id, module.modules()))
        module.forward = _distinct_only(module.forward)
        count += 1
    return count


def _distinct_only(forward: Any) -> Any:
    @functools.wraps(forward)
    def distinct(pixel_values: torch.Tensor, *args: Any, **options: Any) -> Any:
        places = _places(pixel_values)
        count = int(places.max()) + 1
        others = (*args, *options.values())
        if count == len(places) or any(isinstance(each, torch.Tensor) for each in others):
            return forward(pixel_values, *args, **options)
        firsts = [int((places == i).nonzero()[0]) for i in range(count)]
        found = forward(pixel_values[firsts], *args, **options)
        return type(found)(**{name: _taken(part, places) for name, part in found.items()})

    return distinct


def _places(images: torch.Tensor) -> torch.Tensor:
    """For each image the number of the distinct image that it equals, by first appearance."""
    sums: list[float] = images.flatten(1).sum(1, dtype=torch.float32).tolist()
    found: list[int] = []
    firsts: list[int] = []
    for image, total in zip(images, sums, strict=True):
        same = (
            place
            for place, first in enumerate(firsts)
            if sums[first] == total and torch.equal(images[first], image)
        )
        place = next(same, len(firsts))
        if place == len(firsts):
            firsts.append(len(found))
        found.append(place)
    return torch.tensor(found, device=images.device)


def _taken(part: Any, places: torch.Tensor) -> Any:
    """Rows of an output, or of each of its parts."""
    if isinstance(part, torch.Tensor):
        return part[places]
    if part is None:
        return None
    return tuple(_taken(each, places) for each in part)
