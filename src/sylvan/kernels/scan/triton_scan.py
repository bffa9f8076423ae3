"""Recurrent mixers on GPUs: a program computes all rows of a request for a block of its state.

As on a CPU, tokens are processed one by one, so a row's bits depend only on the earlier rows of its
request. States stay in registers. Convolutions, whose state is their last inputs, compute rows in
parallel.

Shapes: T rows, R requests, C channels, K taps or keys, H heads, P channels of a head, N numbers of
state a channel, V values, G groups, S slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sylvan.kernels.gpu.launch import launch_early
from sylvan.kernels.gpu.tiles import ceil_div, power_of_two
from sylvan.kernels.gpu.triton_early import inputs_ready
from sylvan.kernels.paged.triton_extend import request_of
from sylvan.kernels.scan.delta import EPS, DeltaInputs
from sylvan.kernels.scan.device_spans import DeviceSpans
from sylvan.kernels.scan.space import SpaceInputs
from sylvan.kernels.scan.spans import Spans

_NUMBERS = 4096  # state numbers per program
_CONV_ROWS, _CONV_COLS = 16, 128


@triton.jit
def _window(x_ptr, state_ptr, start, at, slot, col, mask, x_stride, channels, TAPS: tl.constexpr):
    """Input number `at` of a request; negative numbers are the inputs kept in its state."""
    inside = at >= 0
    fresh = tl.load(x_ptr + (start + at) * x_stride + col, mask=mask & inside, other=0.0)
    kept_at = state_ptr + (slot * TAPS + TAPS + at) * channels + col
    kept = tl.load(kept_at, mask=mask & (at < 0), other=0.0)
    return tl.where(inside, fresh.to(tl.float32), kept.to(tl.float32))


@triton.jit(do_not_specialize=["requests"])
def _conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    out_ptr,
    start_ptr,
    slot_ptr,
    requests,
    channels,
    x_stride,
    weight_stride,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of the rows of one request times a block of channels."""
    inputs_ready(EARLY)
    tile = tl.program_id(0)
    request = request_of(start_ptr, tile, requests, ROWS)
    start = tl.load(start_ptr + request)
    rows = tl.load(start_ptr + request + 1) - start
    slot = tl.load(slot_ptr + request).to(tl.int64)
    first = (tile - (start // ROWS + request)) * ROWS
    if (first < rows) & (slot >= 0):
        row = (first + tl.arange(0, ROWS))[:, None]
        col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
        mask = (row < rows) & (col < channels)
        begin = start.to(tl.int64)
        total = tl.zeros([ROWS, COLS], tl.float32)
        for tap in tl.static_range(TAPS):
            at = row - (TAPS - 1 - tap)
            x = _window(x_ptr, state_ptr, begin, at, slot, col, mask, x_stride, channels, TAPS)
            w = tl.load(weight_ptr + col * weight_stride + tap, mask=col < channels, other=0.0)
            total += x * w.to(tl.float32)
        if BIAS:
            total += tl.load(bias_ptr + col, mask=col < channels, other=0.0).to(tl.float32)
        y = total.to(out_ptr.dtype.element_ty)
        if SILU:
            wide = y.to(tl.float32)
            y = (wide / (1.0 + tl.exp(-wide))).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (begin + row) * channels + col, y, mask=mask)


@triton.jit
def _keep_kernel(
    x_ptr,
    state_ptr,
    start_ptr,
    slot_ptr,
    save_ptr,
    channels,
    x_stride,
    SAVED: tl.constexpr,
    TAPS: tl.constexpr,
    COLS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Store the last inputs of a request or a save in its slot."""
    inputs_ready(EARLY)
    request = tl.program_id(0)
    if SAVED:
        save = save_ptr + request * 3
        request = tl.load(save)
    start = tl.load(start_ptr + request)
    rows = tl.load(start_ptr + request + 1) - start
    slot = tl.load(slot_ptr + request).to(tl.int64)
    target = slot
    if SAVED:
        rows = tl.load(save + 1)
        target = tl.load(save + 2).to(tl.int64)
    if (rows > 0) & (slot >= 0):
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        mask = col < channels
        # Ascending, so that the slot is read ahead of what has been written.
        for tap in tl.static_range(TAPS):
            at = rows - TAPS + tap
            x = _window(
                x_ptr,
                state_ptr,
                start.to(tl.int64),
                at,
                slot,
                col,
                mask,
                x_stride,
                channels,
                TAPS,
            )
            to = state_ptr + (target * TAPS + tap) * channels + col
            tl.store(to, x.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _due(save_ptr, save, last, done):
    """Whether the next save of a request is due after `done` rows."""
    return tl.load(save_ptr + save * 3 + 1, mask=save < last, other=-1) == done


@triton.jit
def _space_kernel(
    x_ptr,
    dt_ptr,
    decay_ptr,
    b_ptr,
    c_ptr,
    skip_ptr,
    state_ptr,
    out_ptr,
    start_ptr,
    slot_ptr,
    first_save_ptr,
    save_ptr,
    channels,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    WIDTH: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    STATES: tl.constexpr,
    BY_STATE: tl.constexpr,
    SAVES: tl.constexpr,
    COLS: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (i, r): COLS channels of request r, counted over all heads."""
    inputs_ready(EARLY)
    request = tl.program_id(1)
    start = tl.load(start_ptr + request).to(tl.int64)
    rows = (tl.load(start_ptr + request + 1) - start).to(tl.int32)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    if (rows > 0) & (slot >= 0):
        col = tl.program_id(0) * COLS + tl.arange(0, COLS)
        there = col < channels
        head = col // WIDTH
        group = head // HEADS_OF_GROUP
        n = tl.arange(0, STATE_BLOCK)
        mask = there[:, None] & (n < STATES)[None, :]
        place = col[:, None] * STATES + n[None, :]
        size = channels.to(tl.int64) * STATES
        held = tl.load(state_ptr + slot * size + place, mask=mask, other=0.0)
        if BY_STATE:
            decay = tl.load(decay_ptr + head[:, None] * STATES + n[None, :], mask=mask, other=0.0)
        else:
            decay = tl.load(decay_ptr + head, mask=there, other=0.0)[:, None]
        skip = tl.load(skip_ptr + head, mask=there, other=0.0).to(tl.float32)
        by_group = group[:, None] * STATES + n[None, :]
        next_save = 0
        last_save = 0
        if SAVES:
            next_save = tl.load(first_save_ptr + request)
            last_save = tl.load(first_save_ptr + request + 1)
        for i in range(rows):
            row = start + i
            x = tl.load(x_ptr + row * x_stride + col, mask=there, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + row * dt_stride + head, mask=there, other=0.0)
            b = tl.load(b_ptr + row * b_stride + by_group, mask=mask, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + row * c_stride + by_group, mask=mask, other=0.0).to(tl.float32)
            held = held * tl.exp(dt[:, None] * decay) + (dt * x)[:, None] * b
            y = tl.sum(held * c, 1) + skip * x
            tl.store(out_ptr + row * channels + col, y, mask=there)
            if SAVES:
                while _due(save_ptr, next_save, last_save, i + 1):
                    to = tl.load(save_ptr + next_save * 3 + 2).to(tl.int64)
                    tl.store(state_ptr + to * size + place, held, mask=mask)
                    next_save += 1
        tl.store(state_ptr + slot * size + place, held, mask=mask)


@triton.jit
def _unit(ptr, k, KEYS: tl.constexpr, eps, scale):
    """Normalise a query or key to this length; float32."""
    x = tl.load(ptr + k, mask=k < KEYS, other=0.0).to(tl.float32)
    return x * (scale / tl.sqrt_rn(tl.sum(x * x, 0) + eps))


@triton.jit
def _delta_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    state_ptr,
    out_ptr,
    start_ptr,
    slot_ptr,
    first_save_ptr,
    save_ptr,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    eps,
    root,
    HEADS: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BY_KEY: tl.constexpr,
    SAVES: tl.constexpr,
    COLS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (i, h, r): COLS values of head h of request r."""
    inputs_ready(EARLY)
    head = tl.program_id(1)
    request = tl.program_id(2)
    start = tl.load(start_ptr + request).to(tl.int64)
    rows = (tl.load(start_ptr + request + 1) - start).to(tl.int32)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    if (rows > 0) & (slot >= 0):
        col = tl.program_id(0) * COLS + tl.arange(0, COLS)
        there = col < VALUES
        key = tl.arange(0, KEY_BLOCK)
        mask = (key < KEYS)[:, None] & there[None, :]
        place = (head * KEYS + key[:, None]) * VALUES + col[None, :]
        size: tl.constexpr = HEADS * KEYS * VALUES
        held = tl.load(state_ptr + slot * size + place, mask=mask, other=0.0)
        of = head // HEADS_OF_GROUP
        next_save = 0
        last_save = 0
        if SAVES:
            next_save = tl.load(first_save_ptr + request)
            last_save = tl.load(first_save_ptr + request + 1)
        for i in range(rows):
            row = start + i
            q = _unit(q_ptr + row * q_stride + of * KEYS, key, KEYS, eps, root)
            k = _unit(k_ptr + row * k_stride + of * KEYS, key, KEYS, eps, 1.0)
            v = tl.load(v_ptr + row * v_stride + head * VALUES + col, mask=there, other=0.0)
            beta = tl.load(beta_ptr + row * beta_stride + head).to(tl.float32)
            if BY_KEY:
                of_keys = decay_ptr + row * decay_stride + head * KEYS + key
                held = held * tl.exp(tl.load(of_keys, mask=key < KEYS, other=0.0))[:, None]
            else:
                held = held * tl.exp(tl.load(decay_ptr + row * decay_stride + head))
            error = (v.to(tl.float32) - tl.sum(held * k[:, None], 0)) * beta
            held = held + k[:, None] * error[None, :]
            y = tl.sum(held * q[:, None], 0)
            tl.store(out_ptr + row * (HEADS * VALUES) + head * VALUES + col, y, mask=there)
            if SAVES:
                while _due(save_ptr, next_save, last_save, i + 1):
                    to = tl.load(save_ptr + next_save * 3 + 2).to(tl.int64)
                    tl.store(state_ptr + to * size + place, held, mask=mask)
                    next_save += 1
        tl.store(state_ptr + slot * size + place, held, mask=mask)


class TritonScans:
    """Implements `Scans`; host spans are copied to the device once per step."""

    def __init__(self) -> None:
        self._host: Spans | None = None
        self._there: DeviceSpans | None = None

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
        there, x_TC = self._on(spans, x_TC.device), _rows(x_TC)
        channels, taps = weight_CK.shape
        weight_CK = weight_CK.contiguous()
        out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        requests, blocks = len(there.slots_R), ceil_div(channels, _CONV_COLS)
        launch_early(
            _conv_kernel,
            (len(x_TC) // _CONV_ROWS + requests, blocks),
            x_TC,
            weight_CK,
            weight_CK if bias_C is None else bias_C,
            state_SKC,
            out_TC,
            there.starts_R1,
            there.slots_R,
            requests,
            channels,
            x_TC.stride(0),
            weight_CK.stride(0),
            TAPS=taps,
            BIAS=bias_C is not None,
            SILU=silu,
            ROWS=_CONV_ROWS,
            COLS=_CONV_COLS,
        )
        kept = [] if there.saves_N3 is None else [(True, len(there.saves_N3))]
        for saved, count in (*kept, (False, requests)):  # own slots last: saves read them
            launch_early(
                _keep_kernel,
                (count, blocks),
                x_TC,
                state_SKC,
                there.starts_R1,
                there.slots_R,
                there.slots_R if there.saves_N3 is None else there.saves_N3,
                channels,
                x_TC.stride(0),
                SAVED=saved,
                TAPS=taps,
                COLS=_CONV_COLS,
            )
        return out_TC

    def space(
        self, inputs: SpaceInputs, state_SHPN: torch.Tensor, spans: Spans | DeviceSpans
    ) -> torch.Tensor:
        there = self._on(spans, state_SHPN.device)
        heads, width, states = state_SHPN.shape[1:]
        x, b, c = (_rows(t) for t in (inputs.x_THP, inputs.b_TGN, inputs.c_TGN))
        dt, decay = _rows(inputs.dt_TH.float()), inputs.decay.float().contiguous()
        out_THP = x.new_empty(len(x), heads, width, dtype=torch.float32)
        block = power_of_two(states)
        cols = max(1, _NUMBERS // block)
        launch_early(
            _space_kernel,
            (ceil_div(heads * width, cols), len(there.slots_R)),
            x,
            dt,
            decay,
            b,
            c,
            inputs.skip_H,
            state_SHPN,
            out_THP,
            *_numbers(there),
            heads * width,
            x.stride(0),
            dt.stride(0),
            b.stride(0),
            c.stride(0),
            WIDTH=width,
            HEADS_OF_GROUP=heads // inputs.b_TGN.shape[1],
            STATES=states,
            BY_STATE=decay.dim() == 2,
            SAVES=there.saves_N3 is not None,
            COLS=cols,
            STATE_BLOCK=block,
        )
        return out_THP

    def delta(
        self, inputs: DeltaInputs, state_SHKV: torch.Tensor, spans: Spans | DeviceSpans
    ) -> torch.Tensor:
        there = self._on(spans, state_SHKV.device)
        heads, keys, values = state_SHKV.shape[1:]
        q, k, v = (_rows(t) for t in (inputs.q_THK, inputs.k_THK, inputs.v_THV))
        decay, beta = _rows(inputs.decay.float()), _rows(inputs.beta_TH)
        out_THV = q.new_empty(len(q), heads, values, dtype=torch.float32)
        block = power_of_two(keys)
        cols = min(power_of_two(values), max(1, _NUMBERS // block))
        launch_early(
            _delta_kernel,
            (ceil_div(values, cols), heads, len(there.slots_R)),
            q,
            k,
            v,
            decay,
            beta,
            state_SHKV,
            out_THV,
            *_numbers(there),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            decay.stride(0),
            beta.stride(0),
            EPS,
            keys**-0.5,
            HEADS=heads,
            HEADS_OF_GROUP=heads // inputs.k_THK.shape[1],
            KEYS=keys,
            VALUES=values,
            BY_KEY=inputs.by_key,
            SAVES=there.saves_N3 is not None,
            COLS=cols,
            KEY_BLOCK=block,
        )
        return out_THV

    def _on(self, spans: Spans | DeviceSpans, device: torch.device) -> DeviceSpans:
        if isinstance(spans, DeviceSpans):
            return spans
        if self._there is None or spans != self._host:
            self._host, self._there = spans, DeviceSpans.of(spans, device)
        return self._there


def _numbers(there: DeviceSpans) -> tuple[torch.Tensor, ...]:
    slots, firsts, saves = there.slots_R, there.first_saves_R1, there.saves_N3
    if firsts is None or saves is None:
        return there.starts_R1, slots, slots, slots  # placeholders
    return there.starts_R1, slots, firsts, saves


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with contiguous rows; the row stride may be larger."""
    flat = x.flatten(1)
    return flat if flat.shape[1] == 1 or flat.stride(1) == 1 else flat.contiguous()
