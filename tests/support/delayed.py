"""A platform whose work does not run until an event is waited for.

Code that forgets to wait reads stale data. A call that would wait for a real device, made inside
work or under `unsynced`, raises `EarlySyncError`.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

from sylvan.runtime.platform.api import Memory
from sylvan.runtime.platform.facts import PlatformFacts

GIB = 1 << 30
FACTS = PlatformFacts(
    name="delayed",
    device_type="cpu",
    attention=("torch", "reference", "dense"),
    runners=("graph", "eager"),
    dtypes=frozenset({"float32", "bfloat16"}),
    float8=(("late2", "float8_e4m3fn"),),
    opener="tests.support.delayed:open_delayed",
)

_TENSOR = torch.Tensor
_WAITING = {
    _TENSOR.item,
    _TENSOR.tolist,
    _TENSOR.numpy,
    _TENSOR.cpu,
    _TENSOR.__bool__,
    _TENSOR.__int__,
    _TENSOR.__float__,
    _TENSOR.__index__,
    _TENSOR.__array__,
    _TENSOR.__contains__,
    _TENSOR.nonzero,
    _TENSOR.masked_select,
    _TENSOR.unique,
    _TENSOR.equal,
    _TENSOR.bincount,
    _TENSOR.unique_consecutive,
    torch.nonzero,
    torch.masked_select,
    torch.unique,
    torch.unique_consecutive,
    torch.bincount,
    torch.equal,
    torch.allclose,
    # uploads of memory that is not pinned wait as well
    torch.from_numpy,
    torch.tensor,
    torch.as_tensor,
}

_REPEATS = {torch.repeat_interleave, _TENSOR.repeat_interleave}


class EarlySyncError(RuntimeError):
    """The CPU would have waited for the device."""


class NoWaiting(TorchFunctionMode):
    """Rejects calls whose result depends on the device's computation.

    Host memory may be read: `pinned` are the addresses of its storages.
    """

    def __init__(self, pinned: frozenset[int] | set[int] = frozenset()) -> None:
        super().__init__()
        self._pinned = pinned

    def __torch_function__(self, func, types, args=(), kwargs=None):
        waits = (
            func in _WAITING
            or (func is _TENSOR.__getitem__ and _has_mask(args[1]))
            or (func in _REPEATS and _counts_on_device(args, kwargs or {}))
        )
        if waits and not self._is_pinned(args):
            raise EarlySyncError(f"{getattr(func, '__name__', func)} waits for the device")
        return func(*args, **(kwargs or {}))

    def _is_pinned(self, args) -> bool:
        first = args[0] if args else None
        with torch._C.DisableTorchFunction():
            known = isinstance(first, torch.Tensor)
            return known and first.untyped_storage().data_ptr() in self._pinned


def _counts_on_device(args, kwargs) -> bool:
    """Whether only the device knows the size of the result."""
    return isinstance(args[-1], torch.Tensor) and kwargs.get("output_size") is None


def _has_mask(index) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, torch.Tensor) and p.dtype == torch.bool for p in parts)


class LateEvent:
    def __init__(self, stream: LateStream, place: int) -> None:
        self._stream, self._place = stream, place

    def done(self) -> bool:
        return self._stream.finished >= self._place

    def wait(self) -> None:
        self._stream.catch_up(self._place)


class LateStream:
    def __init__(self) -> None:
        self._work = deque()
        self._given = 0
        self.finished = 0
        self.max_waiting = 0

    def run(self, work) -> None:
        self._work.append(work)
        self._given += 1
        self.max_waiting = max(self.max_waiting, len(self._work))

    def event(self) -> LateEvent:
        return LateEvent(self, self._given)

    def after(self, event) -> None:
        self.run(event.wait)

    def catch_up(self, place: int) -> None:
        while self.finished < place:
            self.finished += 1
            work = self._work.popleft()
            try:
                with torch.inference_mode(), NoWaiting():
                    work()
            except Exception:
                while self.finished < place:  # a launch that fails is not followed by its rest
                    self.finished += 1
                    self._work.popleft()
                raise


class ReplayedGraph:
    """Keeps the callable; a replay runs it again with the same output."""

    def __init__(self, platform: DelayedPlatform) -> None:
        self._platform = platform

    def capture(self, work):
        with NoWaiting():
            self._out = work()
        self._work = work
        self._platform.captured += 1
        return self._out

    def replay(self) -> None:
        self._platform.replayed += 1
        self._out.copy_(self._work())


class DelayedPlatform:
    """A platform with `memory_bytes` free; `peak` returns the given `peaks` in turn. `late1` has no
    FP8.
    """

    def __init__(
        self,
        facts: PlatformFacts = FACTS,
        *,
        memory_bytes: int = 4 * GIB,
        chip: str = "late2",
    ) -> None:
        self.facts = facts
        self.device = torch.device("cpu")
        self.chip = chip
        self.captured = self.replayed = self.trimmed = 0
        self.peaks: list[int] = []
        self.memory_bytes = memory_bytes
        self.late = LateStream()
        self._pinned: list[torch.Tensor] = []
        self._addresses: set[int] = set()

    def memory(self) -> Memory:
        return Memory(self.memory_bytes, 8 * GIB)

    def peak(self, work) -> int:
        self.late.run(work)
        self.late.event().wait()
        return self.peaks.pop(0) if self.peaks else 0

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.zeros(size, dtype=dtype)
        self._pinned.append(made)  # kept, so that no other memory gets its address
        self._addresses.add(made.untyped_storage().data_ptr())
        return made

    def stream(self) -> LateStream:
        return self.late

    def side_stream(self) -> LateStream:
        return LateStream()

    def graph(self) -> ReplayedGraph:
        return ReplayedGraph(self)

    @contextmanager
    def unsynced(self):
        with NoWaiting(self._addresses):
            yield

    def trim(self) -> None:
        self.trimmed += 1


class DelayedKind:
    facts = FACTS

    def problem(self) -> str | None:
        return None

    def memory(self) -> tuple[int, int]:
        return 4 * GIB, 8 * GIB


KIND = DelayedKind()


def open_delayed(facts: PlatformFacts) -> DelayedPlatform:
    return DelayedPlatform(facts)
