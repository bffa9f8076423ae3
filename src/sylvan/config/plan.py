"""Where the bytes go: weights, working memory of a step, and what is left for the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.config.facts import DTYPE_BYTES, QUANTISED_BITS, CheckpointInfo
from sylvan.config.fields import size_text
from sylvan.config.quantization import STORED

CPU_SHARE = 0.5
"""Share of the free memory that a CPU server plans with: other programs live there too."""
GPU_SHARE = 0.9
"""Share of the free memory of a GPU; the rest is for its libraries and fragmentation."""
MIN_SEQUENCES = 1
"""The KV cache must hold at least so many sequences of full length."""
WINDOW_CACHE_SHARE = 0.25
"""Tokens of a window's group for cached prefixes, a token of full attention: a prefix can be gone
on with where its last window is there, which is one place in four windows."""
STEPS_UNDER_WAY = 2
"""A page behind a window is free once the step that passed it is done."""


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """What the layers of a KV group keep of a token, and for how many newest tokens they do."""

    bytes_per_token: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLoad:
    """What a server computes at most: requests at once, and tokens of a step."""

    running_reqs: int
    step_tokens: int
    page_size: int


def group_bytes(
    bytes_per_token: int, layer_windows: Sequence[int | None] = ()
) -> tuple[GroupBytes, ...]:
    """KV groups of a model: full attention first, then windows, narrow ones first.

    Args:
        bytes_per_token: Of all layers with keys and values, which keep equally much.
        layer_windows: Of each of them; none: all see everything.
    """
    windows = sorted(set(layer_windows) or {None}, key=lambda w: (w is not None, w or 0))
    each = bytes_per_token // max(1, len(layer_windows))
    if len(windows) == 1:
        return (GroupBytes(bytes_per_token, windows[0]),)
    return tuple(GroupBytes(each * list(layer_windows).count(w), w) for w in windows)


def group_tokens(window: int | None, num_tokens: int, load: PlannedLoad) -> int:
    """Tokens that a KV group needs so that `num_tokens` of full attention can be served.

    A window needs itself for each running request, wherever in a page it begins and ends, what
    the steps under way add, and a share for cached prefixes.
    """
    if window is None:
        return num_tokens
    page = load.page_size
    running = load.running_reqs * (-(-window // page) + 2) * page
    steps = STEPS_UNDER_WAY * -(-load.step_tokens // page) * page
    cached = int(num_tokens * WINDOW_CACHE_SHARE) // page * page
    return min(num_tokens, running + steps + cached)


def kv_bytes(groups: Sequence[GroupBytes], num_tokens: int, load: PlannedLoad) -> int:
    """Bytes of all groups of a KV cache for `num_tokens`."""
    if len(groups) == 1:
        return groups[0].bytes_per_token * num_tokens
    return sum(g.bytes_per_token * group_tokens(g.window, num_tokens, load) for g in groups)


def fitting_tokens(groups: Sequence[GroupBytes], budget_bytes: int, load: PlannedLoad) -> int:
    """The most tokens, in whole pages, whose KV fits into a budget."""
    page, least = load.page_size, min(group.bytes_per_token for group in groups)
    low, high = 0, max(0, budget_bytes) // (least * page)
    while low < high:  # bytes grow with tokens
        middle = (low + high + 1) // 2
        fits = kv_bytes(groups, middle * page, load) <= budget_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * page


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of each use on the device. `budget_bytes` is what all of them may take together.

    `num_tokens` are those of full attention; layers with a window may have fewer, see `groups`.
    """

    budget_bytes: int
    weight_bytes: int
    work_bytes: int
    groups: tuple[GroupBytes, ...]
    load: PlannedLoad
    num_tokens: int

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.load.page_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Of a token that all layers keep."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def kv_bytes(self) -> int:
        """Size of the KV cache."""
        return self.bytes_of(self.num_tokens)

    def bytes_of(self, num_tokens: int) -> int:
        """Size that a KV cache for so many tokens would have."""
        return kv_bytes(self.groups, num_tokens, self.load)

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache."""
        return self.num_tokens // self.page_size

    @property
    def total_bytes(self) -> int:
        """All uses together."""
        return self.weight_bytes + self.work_bytes + self.kv_bytes

    def describe(self) -> str:
        """One line: `weights 9 MiB + working memory 5 MiB + KV cache 64 MiB (...) of 11 GiB`."""
        return (
            f"weights {size_text(self.weight_bytes)} + working memory {size_text(self.work_bytes)}"
            f" + KV cache {size_text(self.kv_bytes)} ({self.num_tokens:,} tokens in "
            f"{self.num_pages:,} pages of {self.page_size}), of {size_text(self.budget_bytes)}"
        )


def weight_bytes(model: CheckpointInfo, dtype: str, quantization: str | None) -> int:
    """Bytes of the loaded weights."""
    if quantization in STORED:
        quantization = model.quantization
    if quantization is None:
        return model.num_params * DTYPE_BYTES[dtype]
    rest = model.num_params - model.num_linear_params
    linear = model.num_linear_params * QUANTISED_BITS[quantization] / 8
    return int(linear) + rest * DTYPE_BYTES[dtype]


def useful_tokens(context_len: int, max_running_reqs: int, page_size: int) -> int:
    """What all running requests can have; more in the KV cache is of use for prefixes only."""
    return -(-context_len // page_size) * page_size * max_running_reqs


def state_bytes(model: CheckpointInfo) -> int:
    """Bytes of one slot of recurrent state, in float32: an upper bound."""
    return 4 * model.state_numbers


def work_bytes(model: CheckpointInfo, max_batch_tokens: int, max_running_reqs: int) -> int:
    """Bytes of the intermediate results of one step, in float32: an upper bound."""
    logits = max_running_reqs * model.vocab_size
    return 4 * (max_batch_tokens * model.work_per_token + 2 * logits)
