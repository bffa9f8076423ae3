"""Recurrent mixers by C++ kernels: one native call per layer for all requests of a step.

Shapes: T rows, C channels, K taps or keys, H heads, P channels of a head, N numbers of state a
channel, V values, G groups, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.graph import Graph, ProgramLimits
from sylvan.kernels.native.layout import plan_memory
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.opset import DeltaScan, ShortConv, SpaceScan
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.schema import Op, RowType
from sylvan.kernels.scan.delta import EPS, DeltaInputs
from sylvan.kernels.scan.device_spans import DeviceSpans
from sylvan.kernels.scan.space import SpaceInputs
from sylvan.kernels.scan.spans import Spans

_MAX_TAPS, _MAX_STATES = 64, 1024  # per channel, so that a block of states fits into scratch
_DTYPES: Mapping[torch.dtype, RowType] = {torch.bfloat16: "bf16", torch.float32: "f32"}


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Rows and slots of a step as kernels read them."""

    run: StepRun
    kept: tuple[np.ndarray, ...]  # arrays that `run` points to


class NativeScans:
    """Implements `Scans`. A row's bits depend only on the earlier rows of its request.

    Args:
        library: Loaded kernels.
        dtype: Dtype of rows and of convolution states.

    Raises:
        Unsupported: There are no kernels for that dtype.
    """

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        if dtype not in _DTYPES:
            raise Unsupported(f"scans of {dtype}")
        self._library, self._dtype = library, dtype
        self._programs: dict[tuple[object, ...], Program] = {}
        self._spans: Spans | None = None
        self._arrays = _arrays(Spans((0,), ()))

    def conv(
        self,
        x_TC: torch.Tensor,
        weight_CK: torch.Tensor,
        bias_C: torch.Tensor | None,
        state_SKC: torch.Tensor,
        spans: Spans | DeviceSpans,
        *,
        silu: bool = False,
    ) -> torch.Tensor:
        """Shape: (T, C)."""
        x_TC = _rows(x_TC.to(self._dtype))
        channels, taps = weight_CK.shape
        if taps > _MAX_TAPS:
            raise Unsupported(f"convolutions of {taps} taps")
        assert state_SKC.shape[1:] == (taps, channels)
        out_TC = torch.empty(x_TC.shape, dtype=self._dtype)
        buffers = {
            "x": x_TC,
            "weight": weight_CK.float().contiguous(),
            "state": state_SKC,
            "out": out_TC,
        }
        if bias_C is not None:
            buffers["bias"] = bias_C.float().contiguous()
        sizes = {
            "channels": channels,
            "taps": taps,
            "weight_stride": taps,
            "x_stride": x_TC.stride(0),
            "out_stride": channels,
            "silu": silu,
        }
        self._run(ShortConv, buffers, sizes, spans)
        return out_TC

    def space(
        self, inputs: SpaceInputs, state_SHPN: torch.Tensor, spans: Spans | DeviceSpans
    ) -> torch.Tensor:
        """Shape: (T, H, P), float32."""
        heads, width, states = state_SHPN.shape[1:]
        if states > _MAX_STATES:
            raise Unsupported(f"{states} numbers of state a channel")
        x, b, c = (_rows(t.to(self._dtype)) for t in (inputs.x_THP, inputs.b_TGN, inputs.c_TGN))
        dt, decay = _rows(inputs.dt_TH.float()), inputs.decay.float().contiguous()
        out_THP = torch.empty(len(x), heads, width, dtype=torch.float32)
        buffers = {
            "x": x,
            "dt": dt,
            "a": decay,
            "b": b,
            "c": c,
            "d": inputs.skip_H.float().contiguous(),
            "state": state_SHPN,
            "out": out_THP,
        }
        sizes = {
            "width": width,
            "num_heads": heads,
            "states": states,
            "groups": inputs.b_TGN.shape[1],
            "a_by_state": decay.dim() == 2,
            "a_stride": states,
            "x_stride": x.stride(0),
            "b_stride": b.stride(0),
            "c_stride": c.stride(0),
            "dt_stride": dt.stride(0),
            "out_stride": heads * width,
        }
        self._run(SpaceScan, buffers, sizes, spans)
        return out_THP

    def delta(
        self, inputs: DeltaInputs, state_SHKV: torch.Tensor, spans: Spans | DeviceSpans
    ) -> torch.Tensor:
        """Shape: (T, H, V), float32."""
        heads, keys, values = state_SHKV.shape[1:]
        if keys > _MAX_STATES:
            raise Unsupported(f"keys of {keys} numbers")
        q, k, v = (_rows(t.to(self._dtype)) for t in (inputs.q_THK, inputs.k_THK, inputs.v_THV))
        decay, beta = _rows(inputs.decay.float()), _rows(inputs.beta_TH.to(self._dtype))
        out_THV = torch.empty(len(q), heads, values, dtype=torch.float32)
        buffers = {
            "q": q,
            "k": k,
            "v": v,
            "decay": decay,
            "beta": beta,
            "state": state_SHKV,
            "out": out_THV,
        }
        sizes = {
            "key_dim": keys,
            "value_dim": values,
            "num_heads": heads,
            "groups": inputs.k_THK.shape[1],
            "q_stride": q.stride(0),
            "k_stride": k.stride(0),
            "v_stride": v.stride(0),
            "decay_stride": decay.stride(0),
            "beta_stride": beta.stride(0),
            "out_stride": heads * values,
            "by_key": inputs.by_key,
            "eps": EPS,
        }
        self._run(DeltaScan, buffers, sizes, spans)
        return out_THV

    def _run(
        self,
        op: type[Op],
        buffers: Mapping[str, torch.Tensor],
        sizes: Mapping[str, float],
        spans: Spans | DeviceSpans,
    ) -> None:
        """Bind the tensors and the requests' spans, then run."""
        assert isinstance(spans, Spans), "a CPU has no device's memory"
        if spans != self._spans:
            self._spans, self._arrays = spans, _arrays(spans)
        key = op, *buffers, *sizes.values()
        if key not in self._programs:
            self._programs[key] = self._compiled(op, tuple(buffers), sizes)
        addresses = [tensor.data_ptr() for tensor in buffers.values()]
        self._programs[key].run_at(self._arrays.run, *enumerate(addresses))

    def _compiled(
        self, op: type[Op], buffers: tuple[str, ...], sizes: Mapping[str, float]
    ) -> Program:
        """A program of one op; its buffers are numbered in order."""
        graph = Graph(ProgramLimits(max_tokens=1, max_outputs=1), self._dtype)
        refs = {name: graph.buffer(0) for name in buffers}
        graph.inputs = list(range(len(graph.sizes)))
        operands: dict[str, Any] = {**refs, **sizes}
        graph.ops.append(op(**operands, dtype=_DTYPES[self._dtype]))
        return Program(self._library, plan_memory(graph))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor with contiguous rows; rows may be strided."""
    flat = x.flatten(1)
    return flat if flat.shape[1] == 1 or flat.stride(1) == 1 else flat.contiguous()


def _arrays(spans: Spans) -> _Arrays:
    starts = np.array(spans.starts, np.int32)
    slots = np.array(spans.slots, np.int32)
    saves = np.array(sorted(spans.saves), np.int32).reshape(-1, 3)
    first = np.searchsorted(saves[:, 0], np.arange(len(slots) + 1)).astype(np.int32)
    saved = np.ascontiguousarray(saves[:, 1:])
    lens = np.zeros(max(1, len(slots)), np.int32)  # KV lengths: there is no KV
    run = StepRun(
        tokens=int(starts[-1]),
        seqs=len(slots),
        row_start=starts.ctypes.data,
        kv_len=lens.ctypes.data,
        state_slots=slots.ctypes.data,
        first_saves=first.ctypes.data,
        saves=saved.ctypes.data,
    )
    return _Arrays(run, (starts, slots, first, saved, lens))
