"""DeepEP's `Buffer` over gloo, for processes without GPUs: the functions that Sylvan calls.

Names, checks and meanings are those of DeepEP 1.2.1 (deep_ep/buffer.py, csrc/deep_ep.cpp). Rows
arrive rank by rank, in the order in which they were sent. Room beyond them holds NaN, so that
nobody gets away with reading it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from sylvan.kernels.collective.gloo import GroupRanks, file_store, join_ranks

topk_idx_t = torch.int64
MAX_CHOSEN, INT4_BYTES = 32, 16


@dataclass(frozen=True)
class Config:
    num_sms: int
    num_max_nvl_chunked_send_tokens: int
    num_max_nvl_chunked_recv_tokens: int
    num_max_rdma_chunked_send_tokens: int
    num_max_rdma_chunked_recv_tokens: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        tokens = self.num_sms // 2 * num_ranks * self.num_max_nvl_chunked_recv_tokens
        return tokens * hidden_bytes


class EventOverlap:
    def current_stream_wait(self) -> None:
        """Nothing runs beside this."""


class Buffer:
    num_sms = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
    ) -> None:
        if group is not None or comm is None:
            raise ValueError("this one has `comm` only")
        self.rank, self.group_size = comm.Get_rank(), comm.Get_size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        devices = comm.allgather(self.rank)
        assert devices == [*range(self.group_size)]
        meeting = bytearray(tempfile.mktemp().encode())  # stands for the handle of memory
        handles = comm.allgather(meeting)
        assert all(isinstance(handle, bytearray) for handle in handles)
        assert set(comm.allgather(None)) == {None}
        store = file_store(handles[0].decode(), self.group_size)
        self._ranks: GroupRanks = join_ranks(store, self.rank, self.group_size, 60.0, 60.0)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 6, 256, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16), f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, 9, 256, 6, 128)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        assert topk_idx.dtype == topk_idx_t
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert num_experts % self.group_size == 0
        chosen = topk_idx[topk_idx >= 0]
        per_expert = chosen.bincount(minlength=num_experts).int()
        owners = topk_idx.div(num_experts // self.group_size, rounding_mode="floor")
        in_rank = torch.stack([(owners == r).any(1) for r in range(self.group_size)], 1)
        return in_rank.sum(0).int(), None, per_expert, in_rank.contiguous(), EventOverlap()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert handle is None, "layouts are not used again"
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        for tensor, dtype in (
            (x, torch.bfloat16),
            (num_tokens_per_rank, torch.int32),
            (is_token_in_rank, torch.bool),
            (num_tokens_per_expert, torch.int32),
            (topk_idx, topk_idx_t),
            (topk_weights, torch.float32),
        ):
            assert tensor.dtype == dtype
            assert tensor.is_contiguous()
        assert x.shape[1] * x.element_size() % INT4_BYTES == 0
        assert len(x) == len(topk_idx) == len(topk_weights) == len(is_token_in_rank)
        assert topk_idx.shape[1] <= MAX_CHOSEN
        assert self.num_nvl_bytes >= self.get_dispatch_config(
            self.group_size
        ).get_nvl_buffer_size_hint(x.shape[1] * x.element_size(), self.group_size)
        local = len(num_tokens_per_expert) // self.group_size
        firsts = torch.arange(self.group_size)[:, None, None] * local
        here = (topk_idx >= firsts) & (topk_idx < firsts + local)  # (ranks, tokens, topk)
        counts = self._ranks.all_to_all(num_tokens_per_rank).tolist()
        most = int(self._ranks.all_gather(torch.tensor([len(x)])).max())
        found = [
            self._exchange(parts, counts, most)
            for parts in (
                [x[is_token_in_rank[:, r]] for r in range(self.group_size)],
                [
                    torch.where(here[r], topk_idx - firsts[r], -1)[is_token_in_rank[:, r]]
                    for r in range(self.group_size)
                ],
                [
                    torch.where(here[r], topk_weights, 0.0)[is_token_in_rank[:, r]]
                    for r in range(self.group_size)
                ],
            )
        ]
        per_local = found[1][found[1] >= 0].bincount(minlength=local).tolist()
        if num_worst_tokens:
            room = (0, 0, 0, num_worst_tokens - len(found[0]))
            fills = (float("nan"), -1, float("nan"))
            found = [
                functional.pad(one, room, value=fill)
                for one, fill in zip(found, fills, strict=True)
            ]
            per_local = []
        return *found, per_local, (counts, is_token_in_rank, most), EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[Any, ...],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        assert topk_weights is None
        assert bias is None
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        counts, is_token_in_rank, most = handle
        back = [*x[: sum(counts)].split(counts)]
        total = torch.zeros(len(is_token_in_rank), x.shape[1])
        sent = is_token_in_rank.sum(0).tolist()
        parts = self._exchange(back, sent, most).split(sent)
        for rank, part in enumerate(parts):  # in float32, rank by rank
            total[is_token_in_rank[:, rank]] += part.float()
        return total.to(x.dtype), None, EventOverlap()

    def _exchange(self, parts: list[torch.Tensor], counts: list[int], most: int) -> torch.Tensor:
        """Part r goes to rank r; returns those that came, `counts` rows of each rank."""
        padded = [functional.pad(part, (0, 0, 0, most - len(part))) for part in parts]
        found = self._ranks.all_to_all(torch.stack(padded))
        return torch.cat([found[rank, :count] for rank, count in enumerate(counts)])
