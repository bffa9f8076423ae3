"""Plans memory: weights, working memory of a step, and the rest for the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sylvan.config.facts import DTYPE_BYTES, GGUF, QUANTISED_BITS, CheckpointInfo
from sylvan.config.fields import size_text
from sylvan.config.quantization import STORED

CPU_SHARE = 0.5
"""Share of the free memory that a CPU server uses, because other programs need some too."""
GPU_SHARE = 0.9
"""Share of a GPU's free memory; the rest is for libraries and fragmentation."""
MIN_SEQUENCES = 1
"""Number of full-length sequences that the KV cache must hold."""
WINDOW_CACHE_SHARE = 0.25
"""Tokens in a window group for cached prefixes, per token of full attention. A prefix can be
continued only where its last window is cached, which is one position in four windows."""
STEPS_UNDER_WAY = 2
"""Pages behind a window are freed when the step that passed them is done."""


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Bytes per token that the layers of a KV group store, and their window."""

    bytes_per_token: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLoad:
    """Maximum load of a server: concurrent requests, and tokens of a step."""

    running_reqs: int
    step_tokens: int
    page_size: int


def group_bytes(
    bytes_per_token: int, layer_windows: Sequence[int | None] = (), entry_bytes: int = 0
) -> tuple[GroupBytes, ...]:
    """KV groups of a model: full attention first, then windows, narrow ones first.

    Args:
        bytes_per_token: Bytes of all layers with keys and values, which are equally large.
        layer_windows: Window of each of these layers; empty: none has a window.
        entry_bytes: Those of `bytes_per_token` that are in none of these layers, nor in a window.
    """
    if entry_bytes:
        rest = group_bytes(bytes_per_token - entry_bytes, layer_windows)
        return (GroupBytes(entry_bytes), *rest)
    windows = sorted(set(layer_windows) or {None}, key=lambda w: (w is not None, w or 0))
    each = bytes_per_token // max(1, len(layer_windows))
    if len(windows) == 1:
        return (GroupBytes(bytes_per_token, windows[0]),)
    return tuple(GroupBytes(each * list(layer_windows).count(w), w) for w in windows)


def group_tokens(window: int | None, num_tokens: int, load: PlannedLoad) -> int:
    """Tokens that a KV group needs to serve `num_tokens` of full attention.

    A window group needs the window of each running request at any page offset, the tokens of steps
    in flight, and a share for cached prefixes.
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
    """The most tokens, in whole pages, whose KV fits into the budget."""
    page, least = load.page_size, min(group.bytes_per_token for group in groups)
    low, high = 0, max(0, budget_bytes) // (least * page)
    while low < high:  # bytes grow with tokens
        middle = (low + high + 1) // 2
        fits = kv_bytes(groups, middle * page, load) <= budget_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * page


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of each use on the device. `budget_bytes` is the limit of their sum.

    `num_tokens` counts tokens of full attention; window groups may hold fewer, see `groups`.
    """

    budget_bytes: int
    weight_bytes: int
    work_bytes: int
    groups: tuple[GroupBytes, ...]
    load: PlannedLoad
    num_tokens: int

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.load.page_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token that all layers store."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def kv_bytes(self) -> int:
        """Size of the KV cache."""
        return self.bytes_of(self.num_tokens)

    def bytes_of(self, num_tokens: int) -> int:
        """Size of a KV cache for `num_tokens`."""
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


def weight_bytes(
    model: CheckpointInfo, dtype: str, quantization: str | None, device: str = "cpu"
) -> int:
    """Bytes of the weights loaded on a kind of device."""
    if quantization in STORED:
        quantization = model.quantization
    if quantization is None:
        return model.num_params * DTYPE_BYTES[dtype]
    rest = model.num_params - model.num_linear_params
    if quantization == GGUF:
        bits = model.matrix_bits if device == "cpu" else model.device_matrix_bits
    else:
        bits = QUANTISED_BITS[quantization]
    linear = model.num_linear_params * bits / 8
    return int(linear) + rest * DTYPE_BYTES[dtype]


def useful_tokens(context_len: int, max_running_reqs: int, page_size: int) -> int:
    """Most tokens that running requests can use; more KV cache only helps cached prefixes."""
    return -(-context_len // page_size) * page_size * max_running_reqs


def state_bytes(model: CheckpointInfo) -> int:
    """Bytes of one slot of recurrent state in float32: an upper bound."""
    return 4 * model.state_numbers


def work_bytes(model: CheckpointInfo, max_batch_tokens: int, max_running_reqs: int) -> int:
    """Bytes of a step's intermediate results in float32: an upper bound."""
    logits = max_running_reqs * model.vocab_size
    return 4 * (max_batch_tokens * model.work_per_token + 2 * logits)
