"""Times recurrent mixers in milliseconds per layer: the C++ kernels against PyTorch token by token.

    python benchmarks/kernels/bench_scan.py --threads 2

Sizes are those of published models. `decode` is one token of each of several requests, `prompt` is
one request. Convolutions and scans are timed alone, without projections.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from sylvan.kernels.native.library import load
from sylvan.kernels.scan import DeltaInputs, Scans, SpaceInputs, Spans, TorchScans
from sylvan.kernels.scan.native import NativeScans

STEPS = {"decode 1": [1], "decode 16": [1] * 16, "prompt 512": [512]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--variant")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    library = load(args.variant)
    library.dll.sylvan_threads(args.threads)
    native, plain = NativeScans(library, torch.bfloat16), TorchScans()
    for name, mixer in MIXERS.items():
        for step, lens in STEPS.items():
            starts = tuple(sum(lens[:i]) for i in range(len(lens) + 1))
            spans = Spans(starts, tuple(range(1, len(lens) + 1)))
            mine = _median_ms(args.repeats, lambda m=mixer, s=spans: m(native, s))
            theirs = _median_ms(3, lambda m=mixer, s=spans: m(plain, s))
            print(f"{name}, {step}: {mine:.3f} ms native, {theirs:.3f} ms PyTorch")


def conv(channels: int, taps: int) -> Callable[[Scans, Spans], torch.Tensor]:
    """Return a convolution of this many channels, with SiLU."""
    weight, bias = _random(channels, taps), _random(channels)
    state, x = torch.zeros(17, taps, channels).bfloat16(), _random(512, channels)
    return lambda scans, spans: scans.conv(
        x[: spans.starts[-1]], weight, bias, state, spans, silu=True
    )


def space(
    heads: int, width: int, states: int, *, by_state: bool = False
) -> Callable[[Scans, Spans], torch.Tensor]:
    """Return a state space of one group; `by_state`: the first Mamba."""
    state, decay = torch.zeros(17, heads, width, states), -torch.rand(heads, states)
    x, dt = _random(512, heads, width), torch.rand(512, heads)
    b, c, skip = _random(512, 1, states), _random(512, 1, states), _random(heads)
    decay = decay if by_state else decay[:, 0].contiguous()

    def run(scans: Scans, spans: Spans) -> torch.Tensor:
        some = slice(spans.starts[-1])
        inputs = SpaceInputs(x[some], dt[some], decay, b[some], c[some], skip)
        return scans.space(inputs, state, spans)

    return run


def delta(heads: int, groups: int, size: int) -> Callable[[Scans, Spans], torch.Tensor]:
    """Return a delta rule with keys and values of the same size."""
    state = torch.zeros(17, heads, size, size)
    q, k, v = _random(512, groups, size), _random(512, groups, size), _random(512, heads, size)
    decay, beta = -torch.rand(512, heads), torch.rand(512, heads).bfloat16()

    def run(scans: Scans, spans: Spans) -> torch.Tensor:
        some = slice(spans.starts[-1])
        inputs = DeltaInputs(q[some], k[some], v[some], decay[some], beta[some])
        return scans.delta(inputs, state, spans)

    return run


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def _median_ms(repeats: int, run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


MIXERS: Mapping[str, Callable[[Scans, Spans], torch.Tensor]] = {
    "convolution, 8192 channels (Qwen3-Next)": conv(8192, 4),
    "delta rule, 32 heads of 128 (Qwen3-Next)": delta(32, 16, 128),
    "state space, 80 heads of 64, 128 states (Mamba 2 2.7B)": space(80, 64, 128),
    "state space, 5120 channels, 16 states (Mamba 2.8B)": space(5120, 1, 16, by_state=True),
}


if __name__ == "__main__":
    main()
