"""KV pages as JAX arrays, which each step consumes and returns.

Groups of devices with different requests have their own pages. Plans number the pages of all groups
consecutively, from 1 on; in the arrays each group also has a page 0, which takes padding.

Shapes: P pages of all groups, K key heads, D columns of a key, V of a value, N pages to move.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from sylvan.kernels.xla.values import Pages
from sylvan.protocol.arrays import IntArray
from sylvan.runtime.core.memory import Checksums, Region, Transfer
from sylvan.runtime.executor.xla.copies import PageCopies
from sylvan.runtime.executor.xla.moves import PageMoves
from sylvan.runtime.executor.xla.weights import AXIS, DATA
from sylvan.runtime.pool.mha import KVShape
from sylvan.runtime.pool.pages import check_of_import, checksums_of
from sylvan.runtime.pool.transfers import HostTransfers


class XlaPool:
    """Implements `KVCachePool`, except `layer` and `store`, which only backends on tensors need.

    Each layer has keys (P, K, page_size, D) and values (P, K, page_size, V), sharded by pages over
    groups of devices, and by heads over those of a group if heads divide evenly. A step consumes
    the arrays and returns new ones in the same memory; references to old arrays become invalid.

    Attributes:
        arrays: Keys and values by attention layer.
        shards: Groups of devices with different requests.
    """

    def __init__(self, shape: KVShape, dtype: Any, mesh: Mesh, latent: int | None) -> None:
        """Allocate zeroed pages: masked values are still multiplied, and 0 * NaN is not 0.

        Args:
            shape: Shape of the pages of each group of devices.
            dtype: JAX dtype.
            mesh: The devices.
            latent: For latent attention: leading columns of the keys that are the values.
        """
        self.page_size, self.layer_groups = shape.page_size, shape.layer_groups
        divided, shards = not shape.num_kv_heads % mesh.shape[AXIS], mesh.shape[DATA]
        self.shards = shards
        self._sharding = NamedSharding(mesh, PartitionSpec(DATA, AXIS if divided else None))
        self.arrays: dict[int, Pages] = {}
        for group in shape.kv_groups:
            pages = shards * group.num_pages
            size = pages, shape.num_kv_heads, shape.page_size, shape.head_dim
            for layer in group.layers:
                keys = self._zeros(size, dtype)
                self.arrays[layer] = keys, None if latent else self._zeros(size, dtype)
        self.groups: Sequence[XlaPages] = [
            XlaPages(self, group.layers, group.num_pages, shards) for group in shape.kv_groups
        ]
        self._copies = [
            PageCopies(self.arrays, group.layers, mesh, per_group=True) for group in shape.kv_groups
        ]
        self._pages = [group.num_pages for group in shape.kv_groups]

    def copy_pages(self, layers: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages of the layers of a group, one after another."""
        if not layers:
            return
        group = self.layer_groups[layers[0]]
        pages = np.array(copies, np.int32)
        owners, local = split_pages(pages, self._pages[group])
        if (owners[:, 0] != owners[:, 1]).any():
            raise ValueError(f"copies {copies}: pages must not be copied between device groups")
        numbers = zip(owners[:, 0].tolist(), *local.T.tolist(), strict=True)
        self._copies[group].run([*numbers])

    def _zeros(self, size: tuple[int, ...], dtype: Any) -> jax.Array:
        make = functools.partial(jnp.zeros, size, dtype)
        return jax.jit(make, out_shardings=self._sharding)()

    # ---- not supported

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Not supported: pages are not tensors."""
        raise NotImplementedError("KV pages on JAX cannot be read as tensors")

    def store(
        self, index: int, slots_T: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> None:
        """Not supported: programs store KV themselves."""
        raise NotImplementedError("KV pages on JAX cannot be written as tensors")

    def move(self, group: int, sources_N: IntArray, targets_N: IntArray) -> None:
        """Not supported: on JAX, draft trees are laid out as paths."""
        raise NotImplementedError("KV pages on JAX are copied as a whole")


def split_pages(numbers: IntArray, num_pages: int) -> tuple[IntArray, IntArray]:
    """Split a plan's page numbers into the device group, and the page number within the group.

    Args:
        numbers: An array of any shape; 0 is page 0 of the first group.
        num_pages: Pages of a group, page 0 included.
    """
    each = max(num_pages - 1, 1)
    owners = np.maximum(numbers - 1, 0) // each
    return owners, numbers - owners * each


class ArrayStore(Protocol):
    """A KV group whose pages `XlaPages` moves."""

    arrays: dict[int, Pages]
    page_size: int

    def copy_pages(self, layers: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, one after another."""
        ...


class XlaPages:
    """Implements `PageMemory` over the layers of a KV group.

    A page is exported layer by layer: its keys, then its values, head by head. Gathers and
    scatters are queued in the order of the steps; only copies to the host use a thread.
    """

    def __init__(
        self, pool: ArrayStore, layers: Sequence[int], num_pages: int, shards: int = 1
    ) -> None:
        """`num_pages` are the pages of each of `shards` groups of devices, page 0 included."""
        self._pool, self._layers, self._each = pool, layers, num_pages
        self.num_pages = 1 + shards * (num_pages - 1)
        self.page_size = pool.page_size
        self.page_bytes = sum(x.nbytes // (shards * num_pages) for x in self._arrays())
        self._transfers = HostTransfers()
        self._moves: PageMoves | None = None

    def regions(self, page: int) -> tuple[Region, ...]:
        """Empty: device memory has no addresses here."""
        self._check(np.array([page]))
        return ()

    def copy_tokens(self, copies: Sequence[tuple[int, int, int]]) -> None:
        if not copies:
            return
        given = np.array(copies, np.int64)
        self._check(given[:, :2])
        if ((given[:, 2] < 0) | (given[:, 2] > self.page_size)).any():
            raise ValueError(
                f"copies of {given[:, 2].tolist()} tokens: pages have {self.page_size}"
            )
        self._pool.copy_pages(self._layers, [(source, target) for source, target, _ in copies])

    def host_buffer(self, num_pages: int) -> NDArray[np.uint8]:
        self._mover()  # compiled before steps, because page moves need a host buffer first
        return self._transfers.host_memory(num_pages * self.page_bytes)

    def export(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksum: bool = False
    ) -> Transfer:
        if not buffer.flags.writeable:
            raise ValueError("the host buffer of an export is read-only")
        self._check(pages)
        host_NW = self._host(pages, buffer)
        gathered = self._mover().gathered(self._arrays(), self._places(pages))

        def work() -> None:
            for first, parts in gathered:
                start, rows = 0, host_NW[first : first + len(parts[0])]
                for part in parts:
                    taken = np.asarray(part)[: len(rows)].reshape(len(rows), -1).view(np.uint8)
                    rows[:, start : start + taken.shape[1]] = taken
                    start += taken.shape[1]

        hashes = (lambda: checksums_of(buffer, self.page_bytes, len(pages))) if checksum else None
        return self._transfers.start(host_NW.nbytes, work, hashes=hashes)

    def import_(
        self, pages: IntArray, buffer: NDArray[np.uint8], *, checksums: Checksums | None = None
    ) -> Transfer:
        check = check_of_import(pages, buffer, self.page_bytes, checksums)
        self._check(pages)
        host_NW = self._host(pages, buffer)
        try:
            if check is not None:
                check()
        except RuntimeError:
            return self._transfers.start(host_NW.nbytes, lambda: None, check=check)
        arrays, start = self._arrays(), 0
        parts: list[np.ndarray] = []
        for x in arrays:
            stop = start + x.nbytes // x.shape[0]
            rows = np.ascontiguousarray(host_NW[:, start:stop]).view(x.dtype)
            parts.append(rows.reshape(-1, *x.shape[1:]))
            start = stop
        changed = iter(self._mover().scattered(arrays, self._places(pages), parts))
        for layer in self._layers:
            _, values = self._pool.arrays[layer]
            self._pool.arrays[layer] = next(changed), None if values is None else next(changed)
        return self._transfers.start(host_NW.nbytes, lambda: None)

    def _arrays(self) -> list[jax.Array]:
        return [x for layer in self._layers for x in self._pool.arrays[layer] if x is not None]

    def _mover(self) -> PageMoves:
        if self._moves is None:
            self._moves = PageMoves(self._arrays())
        return self._moves

    def _places(self, pages: IntArray) -> IntArray:
        """Indices of pages in the arrays, where each group has its own page 0."""
        owners, local = split_pages(pages, self._each)
        return owners * self._each + local

    def _host(self, pages: IntArray, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View host memory as pages (N, bytes)."""
        needed = len(pages) * self.page_bytes
        if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
            raise ValueError("a host buffer must be contiguous and of type uint8")
        if buffer.nbytes < needed:
            raise ValueError(f"{len(pages)} pages are {needed} bytes; {buffer.nbytes} were given")
        return buffer.reshape(-1)[:needed].reshape(len(pages), self.page_bytes)

    def _check(self, pages: NDArray[np.integer[Any]]) -> None:
        if pages.size and not 0 <= pages.min() <= pages.max() < self.num_pages:
            raise ValueError(f"pages {pages.tolist()} must be in 0..{self.num_pages - 1}")
