"""Recurrent mixers by C++ kernels: each step of each request in one native call a layer.

Shapes: T rows, C channels, K taps or keys, H heads, P channels of a head, N numbers of state a
channel, V values, G groups, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sylvan.kernels.api import Unsupported
from sylvan.kernels.native.binding import Kind, Run
from sylvan.kernels.native.library import Library
from sylvan.kernels.native.plan import Call, Draft, place
from sylvan.kernels.native.program import Program
from sylvan.kernels.scan.delta import EPS, DeltaInputs
from sylvan.kernels.scan.space import SpaceInputs
from sylvan.kernels.scan.spans import Spans

_MOST_TAPS, _MOST_STATES = 64, 1024  # of a channel: a block of states fits into scratch memory
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}


@dataclass(frozen=True, slots=True)
class _Arrays:
    """A step's rows and slots as kernels read them."""

    run: Run
    kept: tuple[np.ndarray, ...]  # which `run` and `places` point at
    places: tuple[int, int, int]  # slots, first saves, saves


class NativeScans:
    """See `Scans`. A row's bits follow from the rows of its request before it, and nothing else.

    Args:
        library: Loaded kernels.
        dtype: Of rows, and of what convolutions keep.

    Raises:
        Unsupported: no kernels for that dtype.
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
        spans: Spans,
        *,
        silu: bool = False,
    ) -> torch.Tensor:
        """See `Scans.conv`. Shape: (T, C)."""
        x_TC = _rows(x_TC.to(self._dtype))
        channels, taps = weight_CK.shape
        if taps > _MOST_TAPS:
            raise Unsupported(f"convolutions of {taps} taps")
        assert state_SKC.shape[1:] == (taps, channels)
        out_TC = torch.empty(x_TC.shape, dtype=self._dtype)
        bias_C = None if bias_C is None else bias_C.to(self._dtype).contiguous()
        weight_CK = weight_CK.to(self._dtype).contiguous()
        tensors = x_TC, weight_CK, bias_C, state_SKC, out_TC
        sizes = channels, taps, x_TC.stride(0), int(silu)
        self._run(Kind.SHORT_CONV, sizes, tensors, spans)
        return out_TC

    def space(self, inputs: SpaceInputs, state_SHPN: torch.Tensor, spans: Spans) -> torch.Tensor:
        """See `Scans.space`. Shape: (T, H, P), float32."""
        heads, width, states = state_SHPN.shape[1:]
        if states > _MOST_STATES:
            raise Unsupported(f"{states} numbers of state a channel")
        x, b, c = (_rows(t.to(self._dtype)) for t in (inputs.x_THP, inputs.b_TGN, inputs.c_TGN))
        dt = _rows(inputs.dt_TH.float())
        decay, skip = inputs.decay.float().contiguous(), inputs.skip_H.float().contiguous()
        out_THP = torch.empty(len(x), heads, width)
        tensors = x, dt, decay, b, c, skip, state_SHPN, out_THP
        strides = (t.stride(0) for t in (x, b, c, dt))
        sizes = width, heads, states, inputs.b_TGN.shape[1], int(decay.dim() == 2), *strides
        self._run(Kind.SPACE_SCAN, sizes, tensors, spans)
        return out_THP

    def delta(self, inputs: DeltaInputs, state_SHKV: torch.Tensor, spans: Spans) -> torch.Tensor:
        """See `Scans.delta`. Shape: (T, H, V), float32."""
        heads, keys, values = state_SHKV.shape[1:]
        if keys > _MOST_STATES:
            raise Unsupported(f"keys of {keys} numbers")
        q, k, v = (_rows(t.to(self._dtype)) for t in (inputs.q_THK, inputs.k_THK, inputs.v_THV))
        decay, beta = _rows(inputs.decay_TH.float()), _rows(inputs.beta_TH.to(self._dtype))
        out_THV = torch.empty(len(q), heads, values)
        tensors = q, k, v, decay, beta, state_SHKV, out_THV
        strides = (t.stride(0) for t in (q, k, v, decay, beta))
        sizes = keys, values, heads, inputs.k_THK.shape[1], *strides
        self._run(Kind.DELTA_SCAN, sizes, tensors, spans, EPS)
        return out_THV

    def _run(
        self,
        kind: Kind,
        sizes: tuple[int, ...],
        tensors: tuple[torch.Tensor | None, ...],
        spans: Spans,
        *scalars: float,
    ) -> None:
        """Bind the tensors in their order, then what says where requests lie, and compute."""
        if spans != self._spans:
            self._spans, self._arrays = spans, _arrays(spans)
        absent = tuple(tensor is None for tensor in tensors)
        key = kind, sizes, absent
        if key not in self._programs:
            self._programs[key] = self._recorded(kind, sizes, absent, scalars)
        addresses = [t.data_ptr() for t in tensors if t is not None]
        places = enumerate([*addresses, *self._arrays.places])
        self._programs[key].run_at(self._arrays.run, *places)

    def _recorded(
        self,
        kind: Kind,
        sizes: tuple[int, ...],
        absent: tuple[bool, ...],
        scalars: tuple[float, ...],
    ) -> Program:
        """One op; the buffers that are there are numbered in their order."""
        draft = Draft()
        buffers = [None if gone else draft.buffer(0) for gone in (*absent, False, False, False)]
        draft.inputs = [buffer for buffer in buffers if buffer is not None]
        row_type = _DTYPES[self._dtype]
        draft.calls.append(Call(kind, "tokens", row_type, tuple(buffers), sizes, scalars))
        return Program(self._library, place(draft))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The same, each row in one piece; rows may lie apart."""
    flat = x.flatten(1)
    return flat if flat.shape[1] == 1 or flat.stride(1) == 1 else flat.contiguous()


def _arrays(spans: Spans) -> _Arrays:
    starts = np.array(spans.starts, np.int32)
    slots = np.array(spans.slots, np.int32)
    saves = np.array(sorted(spans.saves), np.int32).reshape(-1, 3)
    first = np.searchsorted(saves[:, 0], np.arange(len(slots) + 1)).astype(np.int32)
    saved = np.ascontiguousarray(saves[:, 1:])
    lens = np.zeros(max(1, len(slots)), np.int32)  # of keys and values, of which there are none
    run = Run(
        tokens=int(starts[-1]),
        seqs=len(slots),
        row_start=starts.ctypes.data,
        kv_len=lens.ctypes.data,
    )
    places = slots.ctypes.data, first.ctypes.data, saved.ctypes.data
    return _Arrays(run, (starts, slots, first, saved, lens), places)
