"""`sylvan lora`: checks an adapter, or merges it into its model."""

from __future__ import annotations

from pathlib import Path

from sylvan.cli.main import DONE, Spec
from sylvan.cli.progress import counting
from sylvan.config.checkpoint import model_dir
from sylvan.config.flags import Parsed
from sylvan.protocol.errors import ConfigError

SPEC = Spec(
    usage="lora check ADAPTER MODEL | lora merge ADAPTER MODEL OUT",
    doc="Check that the LoRA adapter in the directory ADAPTER (PEFT's format) fits the model "
    "directory MODEL, or write the model with the adapter in its weights to the new directory OUT, "
    "which `sylvan serve OUT` then serves.",
    tree=None,
    max_positions=4,
)
_WORDS = {"check": 3, "merge": 4}


def run(args: Parsed) -> int:
    words = args.positions
    if not words or len(words) != _WORDS.get(words[0]):
        raise ConfigError(f"usage: sylvan {SPEC.usage}")
    adapter_dir, source = Path(words[1]).expanduser(), model_dir(words[2])
    from sylvan.runtime.models.lora_merge import open_merged  # imports torch
    from sylvan.runtime.models.writer import write_checkpoint

    adapter, merged = open_merged(source, adapter_dir)
    kind = "DoRA" if adapter.config.use_dora else "LoRA"
    print(
        f"{adapter_dir}: {kind} of rank {adapter.max_rank}, {len(adapter.modules)} modules, "
        f"{len(adapter.whole)} whole tensors; it fits {source}"
    )
    if words[0] == "merge":
        target = Path(words[3]).expanduser()
        with counting(f"merging {words[1]} into {words[2]}") as progress:
            write_checkpoint(source, target, merged, progress)
        print(f"{target}: {merged.num_changed} tensors changed\n\n  sylvan serve {target}")
    return DONE
