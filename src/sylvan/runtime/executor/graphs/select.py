"""Chooses the step program where the model and the machine allow it, and says why where not."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.library import LibraryMissing, load
from sylvan.runtime.core.forward import BatchLimits
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.models.registry import Model
from sylvan.runtime.pool.mha import KVShape

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOptions:
    """How to build a program. `threads` None is one for each CPU this process may use."""

    dtype: torch.dtype
    threads: int | None = None
    variant: str | None = None  # of the library; None is the best for this CPU


def make_program(
    model: Model, limits: BatchLimits, kv: KVShape, options: ProgramOptions
) -> tuple[ProgramRunner, NativePool]:
    """Record `model` and make its KV pool.

    Raises:
        Unsupported: the model needs an op or a shape without a native kernel; it is left intact.
        LibraryMissing: there are no compiled kernels.
    """
    library = load(options.variant)
    pool = NativePool(kv, options.dtype)
    threads = options.threads or available_cpus()
    runner = ProgramRunner(model, limits, pool, library, dtype=options.dtype, threads=threads)
    return runner, pool


def try_program(
    model: Model, limits: BatchLimits, kv: KVShape, options: ProgramOptions
) -> tuple[ProgramRunner, NativePool] | None:
    """The same, or None after one log line that says why PyTorch computes instead."""
    try:
        return make_program(model, limits, kv, options)
    except LibraryMissing as why:
        _log.warning("native kernels missing, PyTorch computes (several times slower): %s", why)
    except Unsupported as why:
        _log.warning("native program not possible, PyTorch computes (slower): %s", why)
    return None


def available_cpus() -> int:
    """CPUs this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
