"""Selects the requests of a step whose KV this rank holds (attention data parallelism).

Groups of ranks hold the KV of different requests. A plan numbers the pages of all groups
consecutively, so a page number identifies the group. Each rank numbers its own pages from 1; pages
of other groups become page 0, which takes the writes of padding rows.

Shapes: T rows of the step, R slices.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.forward import ForwardBatch, LocalRows
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.executor.api import Pending
from sylvan.runtime.executor.inputs import fill_step
from sylvan.runtime.executor.local import PlanWorker
from sylvan.runtime.layers.mesh import Mesh

_Index = NDArray[np.int64]


class LocalRequests:
    """Finds this rank's requests in each plan, and lays out their rows for attention.

    Args:
        batch: The batch of whole steps.
        group: Number of this rank's group.
        count: Number of groups.
    """

    def __init__(self, batch: ForwardBatch, group: int, count: int) -> None:
        self._whole, self._group, self._count = batch, group, count
        sizes = [memory.num_pages - 1 for memory in batch.kv.groups]
        self._sizes: IntArray = np.array(sizes, np.int32)  # pages of this rank, by KV group
        self._owners: IntArray = np.zeros(batch.limits.max_reqs, np.int32)  # by request slot
        self._rows: _Index = np.empty(0, np.int64)  # local rows of the step
        self._mine: _Index = np.empty(0, np.int64)  # local slices of the step
        self._local = ForwardBatch(batch.limits, batch.kv, batch.attention)
        self._local.host.page_tables, self._local.page_tables = (
            batch.host.page_tables,
            batch.page_tables,
        )

    def localised(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the page numbers of this rank. Call it for each plan, in order."""
        pages, copies = plan.pages, plan.copies
        if pages.size:
            kv_groups, slots, entries, numbers = pages
            owners = (numbers - 1) // self._sizes[kv_groups]
            exist = numbers > 0
            self._owners[slots[exist]] = owners[exist]
            here = exist & (owners == self._group)
            local = np.where(here, numbers - self._group * self._sizes[kv_groups], 0)
            pages = np.stack((kv_groups, slots, entries, local.astype(np.int32)))
        if copies:
            copies = tuple(
                copy._replace(source=copy.source - first, target=copy.target - first)
                for copy in copies
                if 0 < copy.source - (first := self._first(copy.group)) <= self._sizes[copy.group]
            )
        return msgspec.structs.replace(plan, pages=pages, copies=copies)

    def choose(self, plan: StepPlan) -> None:
        """Set `ForwardBatch.local` to the local rows of a plan; `lay_out` fills its batch."""
        lens = plan.stops - plan.starts
        owners_R = self._owners[plan.slots]
        owners_T = np.repeat(owners_R, lens)
        counts = np.bincount(owners_T, minlength=self._count)
        places_T = np.empty(plan.num_tokens, np.int64)
        for group, count in enumerate(counts.tolist()):
            places_T[owners_T == group] = np.arange(count) + group * int(counts.max())
        self._rows = np.flatnonzero(owners_T == self._group).astype(np.int64)
        self._mine = np.flatnonzero(owners_R == self._group).astype(np.int64)
        self._whole.local = LocalRows(
            batch=self._local,
            rows=torch.from_numpy(self._rows),
            max_rows=int(counts.max()),
            places_T=torch.from_numpy(places_T),
        )

    def lay_out(self, plan: StepPlan) -> None:
        """Fill the batch of this rank's requests, once that of the whole step is filled."""
        whole, local = self._whole, self._local
        self._fill(plan, self._mine, self._rows)
        local.row_ends = None if whole.row_ends is None else whole.row_ends[self._rows]

    def _first(self, kv_group: int) -> int:
        return self._group * int(self._sizes[kv_group])

    def _fill(self, plan: StepPlan, mine: _Index, rows: _Index) -> None:
        local, host = self._local, self._local.host
        part = _slices_of(plan, mine, rows)
        fill_step(vars(host), part, host.page_tables, local.kv.page_size)
        host.positions[: len(rows)] = self._whole.host.positions[rows]  # shifts and drafts included
        host.input_ids[: len(rows)] = self._whole.host.input_ids[rows]
        local.ready(len(rows), len(mine), 0)


def local_requests(batch: ForwardBatch, mesh: Mesh) -> LocalRequests | None:
    """Return the selector of this rank's requests; None if every rank has all requests."""
    if (groups := mesh.row_groups) is None:
        return None
    return LocalRequests(batch, groups.group, mesh.attention_dp)


def _slices_of(plan: StepPlan, mine: _Index, rows: _Index) -> StepPlan:
    """Return a plan of some slices, which samples nothing and has no work for capabilities."""
    numbers = (plan.slots[mine], plan.starts[mine], plan.stops[mine], plan.input_ids[rows])
    return StepPlan(
        num_slices=len(mine),
        num_tokens=len(rows),
        num_samples=0,
        num_in_flight=0,
        numbers=np.concatenate(numbers).astype(np.int32),
        number=plan.number,
    )


class LocalPagesWorker:
    """Implements `PlanWorker`: converts plans to this rank's page numbers before they run."""

    def __init__(self, worker: PlanWorker, requests: LocalRequests) -> None:
        self._worker, self._requests = worker, requests

    def launch(self, plan: StepPlan) -> Pending:
        """Compute a step."""
        return self._worker.launch(self._requests.localised(plan))

    def close(self) -> None:
        """End the threads."""
        self._worker.close()
