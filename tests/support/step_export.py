"""Serialises a step of a program, so that `step_runner.cpp` can run it on another architecture."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.library import load
from sylvan.runtime.executor import build
from sylvan.runtime.executor.options import LocalOptions

LENGTHS = (24, 17)
"""Tokens of the requests of the step, each of two pages."""


def write_step(model_dir: Path, options: LocalOptions, path: Path, monkeypatch) -> bytes:
    """Write a step of prompts by the portable kernels; return its logits and final pages."""
    made: list[tuple] = []

    class Seen(build.ProgramRunner):
        def __init__(self, model, limits, pool, *rest, **more) -> None:
            super().__init__(model, limits, pool, *rest, **more)
            made.append((self, pool))

    monkeypatch.setattr(build, "ProgramRunner", Seen)
    monkeypatch.setattr(build, "load_library", lambda: load("portable"))
    executor, _ = build.build_executor(model_dir, options)
    [(runner, pool)] = made
    batch = executor._worker._backend.batch
    _fill(batch)
    run = runner._step(batch)
    [group] = pool.groups
    pages = group.memory.numpy().reshape(-1)
    layout, logits = runner._layout, runner._traced.logits
    out = runner._program.number(logits)
    assert logits.dtype == "f32"
    width = -(-logits.cols // 32) * 32 * 4
    out_bytes = len(LENGTHS) * width
    with path.open("wb") as file:

        def put(*values: int | np.ndarray | ctypes.Structure) -> None:
            for value in values:
                file.write(value.to_bytes(8, "little", signed=True) if isinstance(value, int)
                           else bytes(value) if isinstance(value, ctypes.Structure)
                           else value.tobytes())  # fmt: skip

        put(pages.nbytes, pages, len(layout.memory), out, out_bytes)
        for memory in layout.memory:
            inside = memory.ctypes.data - pages.ctypes.data
            put(*((~inside,) if 0 <= inside < pages.nbytes else (memory.nbytes, memory)))
        put(len(layout.records), layout.records.nbytes, layout.records)
        arrays = {array.ctypes.data: array for array in vars(batch.host).values()}
        fields = {name: getattr(run, name) for name, _ in StepRun._fields_}
        pointed = {n: arrays[v] for n, v in fields.items() if v in arrays}
        put(ctypes.sizeof(run), run, len(pointed))
        for name, array in pointed.items():
            put(getattr(StepRun, name).offset, array.nbytes, np.ascontiguousarray(array))
    runner.run(batch)
    found = layout.memory[out][:out_bytes].tobytes() + pages.tobytes()
    executor.close()
    return found


def _fill(batch) -> None:
    host, tokens = batch.host, sum(LENGTHS)
    rows = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    host.input_ids[:tokens] = np.random.default_rng(3).integers(0, 250, tokens)
    host.positions[:tokens] = np.concatenate([np.arange(length) for length in LENGTHS])
    host.page_tables[0][:2, :2] = [[1, 2], [3, 4]]
    host.req_slots[:2], host.kv_lens[:2] = [0, 1], LENGTHS
    ends = np.cumsum(LENGTHS)
    host.q_starts[1:3], host.sample_rows[:2] = ends, ends - 1
    host.map_slots(rows, host.positions[:tokens], 16)
    batch.ready(tokens, 2, 2)
