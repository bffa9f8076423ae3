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


def encode_equal_images_once(model: nn.Module) -> None:
    """Let each tower of `TOWERS` run on the distinct images of a batch only."""
    inside: set[int] = set()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if id(module) in inside or getattr(config, "model_type", None) not in TOWERS:
            continue
        inside.update(map(id, module.modules()))
        module.forward = _distinct_only(module.forward)


def _distinct_only(forward: Any) -> Any:
    @functools.wraps(forward)
    def distinct(pixel_values: torch.Tensor, *args: Any, **options: Any) -> Any:
        others = (*args, *options.values())
        if len(pixel_values) < 2 or any(isinstance(each, torch.Tensor) for each in others):
            return forward(pixel_values, *args, **options)
        firsts, copies = _distinct(pixel_values)
        if len(firsts) == len(copies):
            return forward(pixel_values, *args, **options)
        found = forward(pixel_values[firsts], *args, **options)
        return type(found)(**{name: _taken(part, copies) for name, part in found.items()})

    return distinct


def _distinct(images: torch.Tensor) -> tuple[list[int], list[int]]:
    """Index of each distinct image's first copy; and for each image, which distinct one it is."""
    sums: list[float] = images.flatten(1).sum(1, dtype=torch.float32).tolist()
    firsts: list[int] = []
    copies: list[int] = []
    for index, total in enumerate(sums):
        same = (
            number
            for number, first in enumerate(firsts)
            if sums[first] == total and torch.equal(images[first], images[index])
        )
        number = next(same, len(firsts))
        if number == len(firsts):
            firsts.append(index)
        copies.append(number)
    return firsts, copies


def _taken(part: Any, copies: list[int]) -> Any:
    """Rows of an output, or of each of its parts."""
    if isinstance(part, torch.Tensor):
        return part[copies]
    if part is None:
        return None
    return tuple(_taken(each, copies) for each in part)
