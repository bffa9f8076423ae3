"""The inputs of a step in host memory, and how large they can be. No tensors.

Shapes: as in `core.forward`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sylvan.protocol.arrays import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """Largest step that the persistent buffers hold.

    `max_samples`: rows with logits; 0: one per request. `max_paths`: extra sequences for paths of
    draft trees.
    """

    max_tokens: int
    max_reqs: int
    max_pages_per_req: int
    max_samples: int = 0
    max_paths: int = 0

    @property
    def max_sampled_rows(self) -> int:
        """Maximum rows with logits in one step."""
        return max(self.max_samples, self.max_reqs)


class HostArrays:
    """The step's inputs as int32 numpy arrays of full size; the worker writes them in place.

    Only the first `num_tokens` or `num_reqs` entries count. `page_tables` (G, S, P) and
    `slot_mappings` (G, T) have one part for each KV group; a page table has one row for each
    request slot and keeps its contents between steps. Entries before a layer's window are not read
    and may name any page. `position_shifts` (S,), also kept between steps, are added to the rotary
    positions of a request.
    """

    def __init__(self, limits: BatchLimits, num_groups: int = 1) -> None:
        tokens, reqs = limits.max_tokens, limits.max_reqs + limits.max_paths
        self.input_ids: IntArray = np.zeros(tokens, np.int32)
        self.positions: IntArray = np.zeros(tokens, np.int32)
        self.token_types: IntArray = np.zeros(tokens, np.int32)
        self.slot_mappings: IntArray = np.zeros((num_groups, tokens), np.int32)
        self.kv_lens: IntArray = np.zeros(reqs, np.int32)
        self.q_starts: IntArray = np.zeros(reqs + 1, np.int32)
        self.req_slots: IntArray = np.zeros(reqs, np.int32)
        self.sample_rows: IntArray = np.zeros(max(tokens, reqs), np.int32)  # drafts are sampled
        self.page_tables: IntArray = np.zeros(
            (num_groups, reqs, limits.max_pages_per_req), np.int32
        )
        self.position_shifts: IntArray = np.zeros(reqs, np.int32)

    @property
    def page_table(self) -> IntArray:
        """(S, P) of the first group."""
        return self.page_tables[0]

    @property
    def out_slots(self) -> IntArray:
        """(T,) of the first group."""
        return self.slot_mappings[0]

    def map_slots(self, req_slots_T: IntArray, positions_T: IntArray, page_size: int) -> None:
        """Set `slot_mappings` of all KV groups: where each row's KV is stored.

        Args:
            req_slots_T: Request slot of each row.
            positions_T: Position of each row in its request.
            page_size: Tokens of a page.
        """
        pages, offsets = np.divmod(positions_T, page_size)
        for table, slots in zip(self.page_tables, self.slot_mappings, strict=True):
            slots[: len(positions_T)] = table[req_slots_T, pages] * page_size + offsets
