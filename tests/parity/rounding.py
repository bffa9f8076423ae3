"""The exact answer of a model of transformers, and how far float32 may be from it.

Two float32 computations of one model differ by their rounding, and by how much depends on the
model, the tokens, and which kernels a library picks for a processor. A fixed bound on their
difference therefore holds on one machine and fails on the next. Here the model runs in float64,
then again with random errors of the size of float32's: what these change is what rounding explains.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

UNIT = 2.0**-24  # largest relative error of rounding to float32
SAMPLES = 4
# A float32 computation is one more draw of the errors that are sampled. Norms and softmax also sum,
# and exp or tanh err by a few units, which are not sampled. The float32 runs of transformers
# themselves are up to 5.5 times the largest sample away, over all families and rows.
SLACK = 8.0

_CONTRACTIONS = {  # the positions of their two matrices
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.bmm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
    torch.ops.aten.baddbmm.default: (1, 2),
}
_LARGEST = 1e30  # masks are beyond, and have no rounding


class Exact:
    """A copy of a model that computes in float64, whatever types its code names."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.deepcopy(model).double()
        self._model.set_experts_implementation("eager")  # others have no float64

    def rows(self, ids: list[int], at_once: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Log probabilities after each of `ids` (len, V), and by what float32 may miss them.

        The second array has the largest explained error of each row: (len,). See `logits_of`.
        """
        exact = self._run(ids, at_once)
        spread = np.zeros(len(ids))
        for seed in range(SAMPLES):
            with RoundingErrors(seed):
                spread = np.maximum(spread, np.abs(self._run(ids, at_once) - exact).max(1))
        return exact, SLACK * spread

    def _run(self, ids: list[int], at_once: int | None) -> np.ndarray:
        with torch.inference_mode(), float64():
            return logits_of(self._model, ids, at_once).log_softmax(-1).numpy()


def logits_of(model: PreTrainedModel, ids: list[int], at_once: int | None = None) -> torch.Tensor:
    """Logits after each of `ids`, by one pass. Shape: (len, V).

    With `at_once` only so many are given at first, and the others one by one, as `generate` does.
    """
    if at_once is None:
        return model(torch.tensor([ids]), use_cache=False).logits[0]
    past, rows = None, []
    for part in (ids[:at_once], *([token] for token in ids[at_once:])):
        out = model(torch.tensor([part]), use_cache=True, past_key_values=past)
        past = out.past_key_values
        rows.append(out.logits[0])
    return torch.cat(rows)


@contextmanager
def float64() -> Iterator[None]:
    """Code that asks for float32, or for nothing, gets float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)


class _Float64(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        named = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **named)


def _wider(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


class RoundingErrors(TorchDispatchMode):
    """Every result errs as if float32 had held it, and every product of matrices been summed in it.

    Numbers that float32 represents exactly have no error.
    Rounding errs by UNIT / sqrt(3) in the mean. A sum of K products of size s whose signs are
    random has partial sums of size s sqrt(k), k = 1..K: one rounding of each adds up to
    s K UNIT / sqrt(6). No order of adding is worse than this one, term by term.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        computed = isinstance(out, torch.Tensor) and out.dtype == torch.float64
        if not computed or any(value.alias_info for value in func._schema.returns):
            return out  # views and tensors that are written in place hold what was computed before
        error = out * self._error(out)
        if func in _CONTRACTIONS:
            a, b = (args[place] for place in _CONTRACTIONS[func])
            size = (a.square() @ b.square()).sqrt()  # of the sum, with random signs
            error = error + size * self._error(out) * math.sqrt(a.shape[-1] / 2)
        # Positions, masks and copies of weights are exact, and masks may be practically infinite.
        exact = (out == out.float()) | (out.abs() > _LARGEST)
        return torch.where(exact, out, out + error)

    def _error(self, like: torch.Tensor) -> torch.Tensor:
        normal = torch.randn(like.shape, generator=self._generator, dtype=torch.float64)
        return normal * (UNIT / math.sqrt(3))
