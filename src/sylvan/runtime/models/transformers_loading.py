"""Loads weights through transformers, with the checks of our own loader.

transformers initialises missing tensors randomly, drops unknown ones and accepts any number; such a
model would generate nonsense. So the files are checked before, and the model after loading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sylvan.checkpoints.formats import PICKLED, weight_format
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.checkpoint import DERIVED, check_finite, missing_tensors
from sylvan.runtime.models.formats.stored import StoredFormat
from sylvan.runtime.models.pickled import PickledWeights
from sylvan.runtime.models.safetensors import Checkpoint
from sylvan.runtime.models.stored import WeightFiles

_REPORTS = "transformers.modeling_utils"  # the logger that reports mismatching tensors


NumbersOf = Callable[[WeightFiles], dict[str, torch.Tensor]]


def plain_numbers(
    files: WeightFiles, stored: StoredFormat, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Dequantise the tensors of a quantised checkpoint, one matrix at a time.

    Raises:
        ConfigError: parts of a matrix are missing or contradict each other; names it.
    """
    there, found, used = files.tensors, dict[str, torch.Tensor](), set[str]()
    stems = dict.fromkeys(name.rpartition(".")[0] for name in there)
    for name in (f"{stem}.weight" for stem in stems):
        parts = stored.parts_of(name, there.keys())
        if parts == (name,) or parts[0] not in there:
            continue
        if missing := [part for part in parts if part not in there]:
            raise ConfigError(missing_tensors(missing))
        found[name] = stored.read(name, parts, files.tensor).numbers().to(dtype)
        used |= set(parts)
    for name in there:
        if name not in used and name not in found and not stored.idle(name, files.tensor):
            found[name] = files.tensor(name)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedTensors:
    """Allowed differences between a checkpoint and the model.

    Attributes:
        headless: Whether the head may be missing, because it is not used.
        quantised: Whether tensors may have integer dtypes.
        ignored: Name prefixes of tensors of other parts of the model.
    """

    headless: bool
    quantised: bool
    ignored: tuple[str, ...] = ()


def read_model(
    read: Callable[..., tuple[Any, Mapping[str, Any]]],
    model_dir: Path,
    *,
    pickled: bool,
    expected: ExpectedTensors,
    numbers: NumbersOf | None = None,
) -> Any:
    """Load a transformers model with exactly the weights in `model_dir`.

    Args:
        read: `from_pretrained` of a class, with all arguments except the directory and
          `output_loading_info`.
        model_dir: The checkpoint.
        pickled: Whether to read PyTorch's own files.
        expected: Allowed differences.
        numbers: Dequantises the files; None for unquantised checkpoints.

    Raises:
        ConfigError: the files are broken or truncated; a tensor is missing, unexpected, of
          another shape than config.json implies, not finite, or not of floats. Names the tensor.
    """
    if weight_format(model_dir) == "pt" and not pickled:
        raise ConfigError(f"{str(model_dir)!r} {PICKLED}")
    files: WeightFiles = PickledWeights(model_dir) if pickled else Checkpoint(model_dir)
    given: tuple[Any, dict[str, Any]] = model_dir, {}
    if numbers is not None:
        given = None, {"state_dict": numbers(files)}
    with _reports() as reports:
        try:
            model, info = read(
                given[0], output_loading_info=True, ignore_mismatched_sizes=True, **given[1]
            )
        except (OSError, ValueError, RuntimeError) as error:
            reason = _unconverted(reports) or str(error)
            raise ConfigError(f"transformers cannot load {str(model_dir)!r}: {reason}") from None
    _check_names(model, info, expected)
    if not expected.quantised:
        _check_types(model, files)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.itemsize > 1 and not name.endswith(DERIVED):
            check_finite(name, tensor)
    return model


def _check_names(model: Any, info: Mapping[str, Any], expected: ExpectedTensors) -> None:
    idle = _head_names(model) if expected.headless else frozenset[str]()
    if missing := sorted(set(info["missing_keys"]) - idle):
        raise ConfigError(missing_tensors(missing))
    if wrong := sorted(info["mismatched_keys"]):
        name, stored, wanted = wrong[0]
        raise ConfigError(
            f"tensor {name!r} has shape {list(stored)}, but config.json implies {list(wanted)}"
        )
    extra = sorted(
        name
        for name in info["unexpected_keys"]
        if not name.endswith(DERIVED)
        and not name.removeprefix("model.").startswith(expected.ignored)
    )
    if extra:
        raise ConfigError(
            f"the checkpoint has the tensor {extra[0]!r}, which this architecture does not use"
            + (f" ({len(extra)} such tensors)" if len(extra) > 1 else "")
        )


def _head_names(model: Any) -> frozenset[str]:
    """Parameters of the output embedding."""
    head = model.get_output_embeddings()
    return frozenset(
        f"{path}.{name}"
        for path, module in model.named_modules()
        if module is head
        for name, _ in module.named_parameters()
    )


def _check_types(model: Any, files: WeightFiles) -> None:
    """Reject integers stored for a float parameter, which transformers would load as values."""
    ends = {
        name.rpartition(".")[2]
        for name, part in model.named_parameters()
        if part.is_floating_point()
    }
    for name, tensor in files.tensors.items():
        parameter = name.rpartition(".")[2] in ends and not name.endswith(DERIVED)
        if parameter and not tensor.dtype.is_floating_point:
            raise ConfigError(
                f"tensor {name!r} is stored as {tensor.dtype}; only plain float weights can be read"
            )


@contextmanager
def _reports() -> Iterator[Sequence[str]]:
    """Context that replaces transformers' report tables in the log by one sentence."""
    kept: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "LOAD REPORT" not in text:
            return True
        kept.append(text)
        return False

    logger = logging.getLogger(_REPORTS)
    logger.addFilter(keep)
    try:
        yield kept
    finally:
        logger.removeFilter(keep)


def _unconverted(reports: Sequence[str]) -> str:
    """The tensor that transformers could not join from the files; "" if none."""
    for line in "\n".join(reports).splitlines():
        name, _, rest = line.partition("|")
        if "CONVERSION" in rest:
            return f"the tensors that make up {name.strip()!r} do not fit together"
    return ""
