"""Several processes or devices that share one model; see `sylvan.config.tree`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sylvan.config.section import Section
from sylvan.config.values import Auto

GPUS = frozenset({"cuda", "rocm"})
"""Devices whose ranks exchange numbers by NCCL."""


class ParallelConfig(Section, frozen=True):
    """Several processes or devices that share one model."""

    tp: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Tensor-parallel ranks: each process holds a share of every layer and its KV, and uses its own
    `threads`."""
    pp: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Pipeline stages, of `parallel.tp` ranks each: every stage holds some of the layers, and as
    many batches are under way."""
    pp_batch: Annotated[int, msgspec.Meta(ge=1, le=65536)] | None = None
    """Most decoding requests of a batch with pipeline stages. Default: an equal share, so that each
    stage has a batch; with as many as there are, stages work one after the other on all of them."""
    pp_ahead: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    """Batches under way beyond one for each stage, which hide slow links between them."""
    ep: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Expert-parallel groups of these ranks: each holds whole experts, instead of a share of every
    expert; divides `parallel.tp`."""
    attention_dp: Annotated[int, msgspec.Meta(ge=1, le=64)] | Auto = 1
    """Data-parallel attention: number of groups of ranks. Each group attends for its own requests
    and stores only their KV, instead of a share of the heads of all requests; all other layers stay
    divided. `auto`: each rank is a group. Divides `parallel.tp`. On JAX: groups of
    `parallel.devices`, each with a whole model."""
    moe_dense_tp: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    """Ranks that share a feed-forward block without experts, in models with experts; 1: each rank
    computes all of it, and sends nothing. Default: all ranks. Divides `parallel.tp`."""
    redundant_experts: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """Copies of experts beyond one of each, for the busiest ones; needs `parallel.ep`."""
    expert_placement: str | None = None
    """JSON file that says which group has which experts, or how busy experts are; default: in the
    order of their numbers."""
    rebalance: bool = False
    """Move experts between groups every `parallel.rebalance_steps` steps, by the rows that each
    computed since; no request ends. `POST /balance_experts` does it once."""
    rebalance_steps: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] = 1000
    """Steps between two movements of experts."""
    expert_exchange: Literal["all_gather", "all_to_all", "deepep"] = "all_gather"
    """Where outputs of experts go: to all ranks, or only to the rank that adds up a row. The latter
    sends fewer bytes; it needs `parallel.ep` = `parallel.tp`. `deepep`: the library of that name
    dispatches rows between NVIDIA GPUs of one machine, and combines outputs."""
    same_bits: bool | Auto = "auto"
    """Answers have the same bits on 1, 2, 4 and 8 ranks, wherever experts are placed; needs plain
    weights and native steps. `auto`: where the model and the other settings allow it."""
    devices: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Devices of one process, on JAX. They divide the model as ranks would, or they form
    `parallel.attention_dp` groups that have different requests."""
    backend: Literal["auto", "shared", "gloo", "nccl"] = "auto"
    """Communication between ranks: shared memory, which on a CPU needs the compiled kernels; gloo,
    which several machines use; on GPUs `nccl` alone, while `shared` also adds up short messages in
    memory that all GPUs of a machine see."""
    nodes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Machines that the ranks are divided among, equally and in order; each is started with the
    same settings."""
    node_rank: Annotated[int, msgspec.Meta(ge=0, le=63)] = 0
    """Number of this machine; number 0 has the HTTP server, the others only ranks."""
    placement: Literal["hand", "ray"] = "hand"
    """Who starts the other machines: you, or the Ray cluster that this machine belongs to."""
    address: str | None = None
    """`HOST:PORT` of machine 0, where the others join; other ports of HOST are used, too. Nothing
    is encrypted, and no password is asked for: the network must be private."""
    join_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """Seconds within which all ranks must connect at start."""
    rank_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    """A rank without a heartbeat for this long is killed; all ranks then restart, and requests
    continue."""

    @property
    def attention_groups(self) -> int:
        """Groups of ranks or devices with different requests."""
        every = max(self.tp, self.devices)
        return self.attention_dp if isinstance(self.attention_dp, int) else every

    @property
    def ranks(self) -> int:
        """Processes that share the model."""
        return self.tp * self.pp

    @property
    def ranks_per_node(self) -> int:
        """Those on each machine."""
        return self.ranks // self.nodes
