"""Converts adapters of expert stacks (PEFT's `target_parameters`) to adapters of single experts.

PEFT names a stack by its module, and nests the stacks of one module: `N.base_layer.lora_A.weight`
belongs to one stack, `N.lora_A.weight` to the other; shapes identify it. A of a stack is (E rank,
inputs), by expert; the columns of B (outputs, rank E) iterate over the experts first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.lora import Adapter, LowRank
from sylvan.runtime.models.stored import WeightFiles

_PLACES = ("", "model.")
_NAMES = (("gate_proj", "up_proj"), ("w1", "w3"), ("down_proj",), ("w2",))
"""The checkpoint's names of a stack's parts, by expert."""
_PATHS = (".mlp.experts", ".block_sparse_moe.experts", ".feed_forward.experts")


def path_of(name: str) -> str:
    """Path of the module whose stacks are changed."""
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return name


def split(module: LowRank, num_experts: int, parts: int) -> Sequence[Sequence[LowRank]]:
    """Split the change of a stack into equal parts, one per expert's matrix."""
    down, up = module.factors
    downs = down.unflatten(0, (num_experts, -1))
    ups = up.unflatten(1, (-1, num_experts)).permute(2, 0, 1).unflatten(1, (parts, -1))
    return [
        [LowRank({"lora_A": downs[expert], "lora_B": part}) for part in ups[expert]]
        for expert in range(num_experts)
    ]


def by_expert(adapter: Adapter, base: WeightFiles) -> dict[str, LowRank]:
    """The modules of an adapter to merge, with stacks split by expert.

    Raises:
        ConfigError: the checkpoint does not store the experts of a stack separately.
    """
    modules: dict[str, LowRank] = {}
    for name, module in adapter.modules.items():
        path = path_of(name)
        is_stack = bool(adapter.config.target_parameters) and path.endswith(".experts")
        modules.update(_found(name, path, module, base) if is_stack else {name: module})
    return modules


def _found(
    name: str, path: str, module: LowRank, base: WeightFiles
) -> Iterator[tuple[str, LowRank]]:
    down, up = module.factors
    for stem, names in _candidates(path):
        count = 0
        while f"{stem}.{count}.{names[0]}.weight" in base.tensors:
            count += 1
        if not count or len(down) % count:
            continue
        outputs, inputs = base.tensors[f"{stem}.0.{names[0]}.weight"].shape
        if (len(up), down.shape[1]) == (outputs * len(names), inputs):
            for expert, parts in enumerate(split(module, count, len(names))):
                for part, own in zip(names, parts, strict=True):
                    yield f"{stem}.{expert}.{part}", own
            return
    raise ConfigError(
        f"the adapter changes {name!r} as a stack of matrices of {[len(up), down.shape[1]]}, but "
        "the checkpoint has no separate tensors of such experts"
    )


def _candidates(path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    stem = path.removeprefix("model.")
    ends = [end for end in _PATHS if stem.endswith(end)]
    stems = [stem, *(stem.removesuffix(end) + other for end in ends for other in _PATHS)]
    for prefix in _PLACES:
        for each in dict.fromkeys(stems):
            for names in _NAMES:
                yield prefix + each, names
