"""Times alternative tile sizes, splits and launch modes of kernels on this GPU.

The table of tiles (`sylvan.kernels.gpu.tiles`) is fixed; its rows were chosen with this program.
Each part times the alternatives of one kernel, or of a whole decode step, in one process; the first
line of a part is the choice that a server uses.

    python benchmarks/gpu/alternatives.py [--only early,rows,experts,extend,latent] [--minutes 6]
    python benchmarks/gpu/alternatives.py --device cpu --tiny     # test this program
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import engine
import kernels
import torch
from attention import LLAMA, OTHERS, Scene
from kernels import Bench, Ceilings
from report import Report, Timer
from shapes import REAL, TINY

from sylvan.kernels import ops
from sylvan.kernels.experts import ExpertWeights, Routing
from sylvan.kernels.gpu import tiles
from sylvan.kernels.gpu.tiles import Tile, TileEntry
from sylvan.runtime.platform.find import load_kinds, open_platform

_BEYOND_CACHE = 1 << 28  # bytes of weights that a timed round reads, more than a chip caches
_LATENT = next(kind for kind in OTHERS if kind.value)


@contextmanager
def used(**chosen: Tile) -> Iterator[None]:
    """Use these tiles for the named ops, at any width; an underscore stands for a space."""
    rows = [TileEntry(op.replace("_", " "), None, 1 << 30, 4, tile) for op, tile in chosen.items()]
    with mock.patch.object(tiles, "TABLE", (*rows, *tiles.TABLE)):
        tiles.tile.cache_clear()
        try:
            yield
        finally:
            tiles.tile.cache_clear()


@contextmanager
def starts(*, early: bool) -> Iterator[None]:
    """Set whether kernels start before their predecessors have ended (programmatic dependent
    launch).
    """
    if early:
        yield
        return
    from sylvan.kernels.gpu import launch

    with mock.patch.object(launch, "EARLY", frozenset()):
        yield


@contextmanager
def without_descriptors() -> Iterator[None]:
    """Read keys and values of prompts by addresses instead of tensor descriptors."""
    from sylvan.kernels.paged import triton_attention

    with mock.patch.object(triton_attention, "_descriptors", return_value=None):
        yield


def compare(
    bench: Bench, name: str, floor_s: float, call: Callable[[], object], *choices: Tile, op: str
) -> None:
    """Time the tile from the table, then each of `choices`."""
    _timed(bench, f"{name}: as served", floor_s, call)
    for choice in choices:
        with used(**{op: choice}):
            _timed(bench, f"{name}: {_shown(choice)}", floor_s, call)


def _timed(bench: Bench, name: str, floor_s: float, call: Callable[[], object]) -> None:
    with bench.report.part(name, bench.needs(3)) as go:
        if go:
            kernels.bound(bench, name, call, floor_s)


def _shown(t: Tile) -> str:
    split = f", splits of {t.split}" if t.split else ""
    inner = f" x {t.inner}" if t.inner else ""
    return f"{t.rows} x {t.cols}{inner}, {t.warps} warps, {t.stages} stages{split}"


def early(bench: Bench, top: Ceilings, folder: Path) -> None:
    """Time a decode step of one request, with and without early starts."""
    for shape in TINY if bench.tiny else (REAL[0], REAL[2]):
        for on in (True, False):
            name = f"{shape.name}: decode 1, {'early' if on else 'late'} starts"
            with bench.report.part(name, bench.needs(40)) as go, starts(early=on):
                if not go:
                    continue
                served = engine.serve(bench, folder, shape)
                try:
                    context = 32 if bench.tiny else 1024
                    seconds, length = served.decode_s(1, context, 4 if bench.tiny else 64)
                    read = engine.active_bytes(shape, served, 1)
                    read += length * served.facts.kv_bytes_per_token
                    floor = read / top.copy
                    more = {"floor": floor * 1e3, "share": floor / seconds}
                    bench.report.add("decode", name, seconds * 1e3, "ms", **more)
                finally:
                    engine.release(bench, served)


def rows(bench: Bench, top: Ceilings, _folder: Path) -> None:
    """Time products of one row, in the shapes of models of 0.6 B and 8 B."""
    shapes = [("qkv", 4096, 1024), ("o", 1024, 2048), ("down", 1024, 3072), ("head", 151936, 1024)]
    gates = [("gate and up", 6144, 1024)]
    if bench.tiny:
        shapes, gates = [("qkv", 96, 64)], [("gate and up", 96, 64)]
    choices = [Tile(1, c, 1024, warps=w) for c, w in ((1, 4), (2, 4), (4, 4), (4, 8), (8, 8))]
    for name, outputs, inputs in (*shapes, *gates):
        gate = (name, outputs, inputs) in gates
        x = bench.randn(1, inputs)
        size = outputs * inputs * x.element_size()
        copies = 1 if bench.tiny else max(1, _BEYOND_CACHE // size)
        weights = [bench.randn(outputs, inputs) for _ in range(copies)]

        def call(x=x, weights=weights, gate=gate) -> None:
            for w in weights:
                _ = ops.gated_linear(x, w, None, "silu") if gate else ops.linear(x, w)

        op = "gated_row" if gate else "row"
        what = f"{copies} x {name}, {outputs} x {inputs}"
        compare(bench, what, copies * size / top.copy, call, *choices, op=op)


def experts(bench: Bench, top: Ceilings, _folder: Path) -> None:
    """Time both products of the experts of one row, in the shape of a model of 30 B with 3 B
    active.
    """
    dim, inner, count, top_k = (64, 32, 4, 2) if bench.tiny else (2048, 768, 128, 8)
    weights = ExpertWeights(
        gate_up=0.02 * bench.randn(count, 2 * inner, dim),
        down=0.02 * bench.randn(count, dim, inner),
    )
    routing = Routing(top_k=top_k, normalise=True)
    x = bench.randn(1, dim)
    logits = [torch.randn(1, count, device=bench.device) for _ in range(1 if bench.tiny else 16)]

    def call() -> None:
        for each in logits:
            ops.experts(x, each, routing, weights)

    floor = len(logits) * top_k * 3 * dim * inner * x.element_size() / top.copy
    name = f"{len(logits)} x experts, 1 row"
    gates = [Tile(1, c, i, warps=w) for c, i, w in ((1, 2048, 8), (2, 1024, 4), (4, 512, 4))]
    downs = [Tile(1, c, i, warps=w) for c, i, w in ((1, 1024, 4), (4, 1024, 8), (4, 256, 4))]
    compare(bench, f"{name}, gate", floor, call, *gates, op="row_gate")
    compare(bench, f"{name}, down", floor, call, *downs, op="row_down")


def extend(bench: Bench, top: Ceilings, _folder: Path) -> None:
    """Time a long prompt."""
    length = 48 if bench.tiny else 8192
    scene = Scene(bench, LLAMA, 1, length, length)
    spec = scene.spec
    work = length * (length + 1) * spec.num_heads * (spec.head_dim + spec.value_dim)
    choices = [
        Tile(128, 64, warps=w, stages=s) for w, s in ((4, 2), (4, 4), (8, 2), (8, 3), (8, 4))
    ]
    choices += [Tile(64, 64, warps=4, stages=3), Tile(256, 64, warps=8, stages=2)]
    name, floor = f"extend {length}", work / top.gemm
    compare(bench, name, floor, scene.run, *choices, op="extend")
    if bench.device.type == "cuda":
        with without_descriptors():
            compare(bench, f"{name}, by addresses", floor, scene.run, *choices[:4], op="extend")


def latent(bench: Bench, top: Ceilings, _folder: Path) -> None:
    """Time decoding with latent attention (DeepSeek)."""
    for requests, context in ((2, 40),) if bench.tiny else ((64, 2048), (8, 8192)):
        scene = Scene(bench, _LATENT, requests, context, 1)
        choices = [
            Tile(64, c, warps=8, stages=s, split=n)
            for c, s, n in ((64, 2, 1024), (64, 2, 2048), (64, 1, 512), (32, 2, 512), (32, 3, 512))
        ]
        choices += [Tile(64, 32, warps=4, stages=2, split=512)]
        floor = scene.kv_bytes(requests, context) / top.copy
        name = f"latent decode {requests} x {context}"
        compare(bench, name, floor, scene.run, *choices, op="latent_decode")


PARTS = {"early": early, "rows": rows, "experts": experts, "extend": extend, "latent": latent}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test this program")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--out", type=Path, default=Path("alternatives.json"))
    options = parser.parse_args()
    kind = load_kinds()[options.device]
    if why := kind.problem():
        print(f"{options.device}: {why}", file=sys.stderr)
        return 2
    device = open_platform(kind)
    name = torch.cuda.get_device_name() if device.device.type == "cuda" else options.device
    report = Report(f"{name}, torch {torch.__version__}", time.monotonic() + 60 * options.minutes)
    bench = Bench(device, report, Timer(device.device, quick=options.tiny), options.tiny)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        top = kernels.ceilings(bench)
        for part in options.only.split(","):
            with report.part(part, bench.needs(5)) as go:
                if go:
                    PARTS[part](bench, top, Path(folder))
    report.write(options.out)
    print(f"\n{report.table()}\n\n{options.out} has the same as JSON")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
