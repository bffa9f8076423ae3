"""Messages between the halves of speculation with a draft head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class TreeShape(NamedTuple):
    """Limits of draft trees.

    Attributes:
        width: Drafts per position; 1: a chain.
        nodes: Drafts of a tree.
    """

    width: int = 1
    nodes: int = 0


CHAIN = TreeShape()


class HeadWork(msgspec.Struct, frozen=True):
    """Work for one step, slice by slice.

    Attributes:
        depths: Draft depth after the token that the slice samples; 0: none.
        following: The token after a slice that samples none; -1: there is none.
    """

    depths: Sequence[int]
    following: Sequence[int]


class HeadReport(msgspec.Struct, frozen=True):
    """The head's drafts.

    Attributes:
        drafts: Drafts of slices that requested some, by index.
        draft_s: Seconds spent on drafting for all slices.
        parents: Parents of drafts that form trees, as in `Draft`.
        failure: Error; empty: none.
    """

    drafts: dict[int, list[int]] = {}
    draft_s: float = 0.0
    parents: dict[int, list[int]] = {}
    failure: str = ""
