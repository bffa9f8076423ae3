"""Where the bytes go: weights, working memory of a step, and what is left for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from sylvan.config.facts import DTYPE_BYTES, QUANTISED_BITS, ModelFacts
from sylvan.config.fields import size_text

CPU_SHARE = 0.5
"""Share of the free memory that a CPU server plans with: other programs live there too."""
GPU_SHARE = 0.9
"""Share of the free memory of a GPU; the rest is for its libraries and fragmentation."""
MIN_SEQUENCES = 1
"""The KV cache must hold at least so many sequences of full length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of each use on the device. `budget_bytes` is what all of them may take together."""

    budget_bytes: int
    weight_bytes: int
    work_bytes: int
    kv_bytes_per_token: int
    page_size: int
    num_tokens: int

    @property
    def kv_bytes(self) -> int:
        """Size of the KV cache."""
        return self.num_tokens * self.kv_bytes_per_token

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


def weight_bytes(model: ModelFacts, dtype: str, quantization: str | None) -> int:
    """Bytes of the loaded weights."""
    if quantization is None:
        return model.num_params * DTYPE_BYTES[dtype]
    rest = model.num_params - model.num_linear_params
    linear = model.num_linear_params * QUANTISED_BITS[quantization] / 8
    return int(linear) + rest * DTYPE_BYTES[dtype]


def useful_tokens(context_len: int, max_running_reqs: int, page_size: int) -> int:
    """What all running requests can have; more in the KV cache is of use for prefixes only."""
    return -(-context_len // page_size) * page_size * max_running_reqs


def state_bytes(model: ModelFacts) -> int:
    """Bytes of one slot of recurrent state, in float32: an upper bound."""
    return 4 * model.state_numbers


def work_bytes(model: ModelFacts, max_batch_tokens: int, max_running_reqs: int) -> int:
    """Bytes of the intermediate results of one step, in float32: an upper bound."""
    logits = max_running_reqs * model.vocab_size
    return 4 * (max_batch_tokens * model.work_per_token + 2 * logits)
