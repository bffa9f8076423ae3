"""DeepEP: rows travel between NVIDIA GPUs to their experts, and sums back, by NVLink.

Its normal kernels (`Buffer.dispatch`, `Buffer.combine`) within one machine, with room for the most
rows that may come, so that no step waits for counts and graphs can hold it. Written after the
interface of DeepEP 1.2.1 and 2.1 (https://github.com/deepseek-ai/DeepEP); never run with the
library, which needs several GPUs. Tests have a module in its place with the same functions, over
gloo.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
import torch

from sylvan.kernels.api import DispatchedRows
from sylvan.protocol.errors import ConfigError

_MAX_CHOSEN = 32  # experts of a row
_ROW_BYTES = 16  # of which a row has a multiple
_INSTEAD = (
    "leave --moe-a2a-backend (parallel.expert_exchange) out: NCCL then adds up over all ranks"
)


class ObjectGroup(Protocol):
    """Ranks that exchange small objects, such as memory handles."""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def gather(self, obj: object) -> list[object]:
        """Objects of all ranks, in order."""
        ...


class StoreGroup:
    """Implements `ObjectGroup` through a store: numbers, bytes, None.

    Args:
        store: Used by this group alone.
        rank: Of this process.
        size: Number of ranks.
        timeout_s: Within which the others must answer.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._store, self._timeout = store, timedelta(seconds=timeout_s)
        self._count = 0

    def gather(self, obj: object) -> list[object]:
        """Objects of all ranks, in order.

        Raises:
            RuntimeError: another rank is late.
        """
        self._count += 1
        names = [f"{self._count}-{rank}" for rank in range(self.size)]
        self._store.set(names[self.rank], msgspec.msgpack.encode(obj))
        self._store.wait(names, self._timeout)
        found = [msgspec.msgpack.decode(self._store.get(name)) for name in names]
        return [bytearray(one) if isinstance(one, bytes) else one for one in found]


class DeepEPDispatcher:
    """Implements `RowDispatcher`.

    All layers use one buffer, as steps do one layer after the other.

    Args:
        group: The ranks.

    Raises:
        ConfigError: The package is not installed, or cannot be loaded.
    """

    def __init__(self, group: ObjectGroup) -> None:
        self._group, self._library = group, _library()
        self._buffer: Any = None
        self._columns = 0
        self._index_type: torch.dtype = getattr(self._library, "topk_idx_t", torch.int64)

    def reserve(self, columns: int, top_k: int, dtype: torch.dtype) -> None:
        row_bytes = columns * dtype.itemsize
        if dtype != torch.bfloat16:
            why = f"rows are bfloat16, and those of this model are {dtype}"
            raise _cannot(why, "set --dtype bfloat16, or ")
        if row_bytes % _ROW_BYTES or top_k > _MAX_CHOSEN:
            raise _cannot(
                f"rows of {columns} columns that visit {top_k} experts cannot be sent (a multiple "
                f"of {_ROW_BYTES // dtype.itemsize}, and at most {_MAX_CHOSEN})"
            )
        if columns <= self._columns:
            return
        kind, size = self._library.Buffer, self._group.size
        sizes = [
            config.get_nvl_buffer_size_hint(row_bytes, size)
            for config in (kind.get_dispatch_config(size), kind.get_combine_config(size))
        ]
        self._buffer = None  # frees its memory
        try:
            self._buffer = kind(None, num_nvl_bytes=max(sizes), comm=_as_comm(self._group))
        except (AssertionError, AttributeError, RuntimeError) as error:
            raise _cannot(f"the GPUs found no way to each other ({_first_line(error)})") from error
        self._columns = columns

    def dispatch(
        self, x_TD: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor, num_slots: int
    ) -> DispatchedRows:
        slots_TK = slots_TK.to(self._index_type).contiguous()
        per_rank, per_machine, per_slot, goes_TN, _ = self._buffer.get_dispatch_layout(
            slots_TK, num_slots
        )
        x_RD, ids_RK, weights_RK, _, handle, _ = self._buffer.dispatch(
            x_TD.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_machine,
            is_token_in_rank=goes_TN,
            num_tokens_per_expert=per_slot,
            topk_idx=slots_TK,
            topk_weights=weights_TK.contiguous(),
            num_worst_tokens=len(x_TD) * self._group.size,
        )
        ids_RK = ids_RK.long()
        return DispatchedRows(x_RD, ids_RK, weights_RK.masked_fill(ids_RK < 0, 0.0), handle)

    def combine(self, sums_RD: torch.Tensor, handle: Any) -> torch.Tensor:
        sums_TD, _, _ = self._buffer.combine(sums_RD.contiguous(), handle)
        return sums_TD


def _as_comm(group: ObjectGroup) -> SimpleNamespace:
    """The group as mpi4py's `Comm`, which DeepEP takes instead of a process group."""
    return SimpleNamespace(
        Get_rank=lambda: group.rank, Get_size=lambda: group.size, allgather=group.gather
    )


def _library() -> Any:
    try:
        return importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise _cannot(f"deep_ep cannot be loaded ({error})") from error
        raise _cannot(
            "the package deep_ep is not installed",
            "install it on this machine (https://github.com/deepseek-ai/DeepEP), or ",
        ) from None
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise _cannot(f"deep_ep cannot be loaded ({_first_line(error)})") from error


def _cannot(why: str, way: str = "") -> ConfigError:
    return ConfigError(f"parallel.expert_exchange=deepep: {why}; {way}{_INSTEAD}")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
