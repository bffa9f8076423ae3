"""Table of supported features by kind of device, derived from the configuration rules.

Nothing is loaded and no device is needed: an imagined machine has one of each kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import convert

from sylvan.config.check import check
from sylvan.config.facts import AttentionFacts, CheckpointInfo, DeviceFacts, Facts
from sylvan.config.resolve import resolve
from sylvan.config.tree import CacheConfig, Config, LoraConfig, ParallelConfig, SpeculativeConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.facts import ATTENTION, attention_of
from sylvan.runtime.platform.facts import Kind
from sylvan.runtime.platform.find import load_kinds

FORMATS = ("w8a8", "w4a8", "w4a16", "fp8")
_DTYPES = ("float32", "bfloat16", "float16")
_KEYS = ("model", "int8", "int4", "fp8_e4m3")
_GIB = 1 << 30
_MODEL = CheckpointInfo(
    name="imagined",
    context_len=2048,
    vocab_size=4096,
    dtype="bfloat16",
    num_params=5_000_000,
    num_linear_params=4_000_000,
    kv_per_token=1536,
    work_per_token=4096,
    head_dim=64,
)


@dataclass(frozen=True, slots=True)
class ChipRow:
    """One kind of device.

    Attributes:
        name: As `device` calls it.
        state: Whether it was ever run.
        cells: By column of `COLUMNS`, what is accepted; empty: nothing, it is refused.
        missing: Why it cannot be used on this machine; empty: it can.
        how: How to get what is missing.
    """

    name: str
    state: str
    cells: Mapping[str, str]
    missing: str
    how: str


COLUMNS = ("types", "formats", "keys", "attention", "runner", "parallel", "guesses", "LoRA")


def chip_rows(kinds: Mapping[str, Kind] | None = None) -> Sequence[ChipRow]:
    """A row for each kind of device, CPUs first; `kinds` instead of those that are installed."""
    known = load_kinds() if kinds is None else kinds
    names = sorted(known, key=lambda name: (name != "cpu", name))
    return [_row(known[name], known) for name in names]


def _row(kind: Kind, kinds: Mapping[str, Kind]) -> ChipRow:
    case = _Case(kind.facts.name, _facts(kind, kinds))
    cells = {
        "types": _joined(name for name in _DTYPES if case.takes({"dtype": name})),
        "formats": _joined(name for name in FORMATS if case.takes({"quantization": name})),
        "keys": _joined(name for name in _KEYS if case.takes_cache(name)),
        "attention": _joined(
            name for name in case.facts.attention if case.takes({"attention": name})
        ),
        "runner": _joined(
            name for name in ("program", "graph", "eager") if case.takes({"runner": name})
        ),
        "parallel": _joined(
            name
            for name, wanted in {
                "ranks": ParallelConfig(tp=2),
                "devices": ParallelConfig(devices=2),
            }.items()
            if case.takes({"parallel": wanted})
        ),
        "guesses": _joined(
            name
            for name in ("ngram", "eagle3")
            if case.takes(
                {
                    "speculative": convert(
                        {"algorithm": name, "draft_model": "heads"}, SpeculativeConfig
                    )
                }
            )
        ),
        "LoRA": "yes" if case.takes({"lora": LoraConfig()}) else "",
    }
    facts = kind.facts
    return ChipRow(facts.name, facts.state, cells, kind.problem() or "", facts.how)


def _joined(names: Iterable[str]) -> str:
    return ", ".join(names)


@dataclass(frozen=True, slots=True)
class _Case:
    """A machine with one device beside its CPU."""

    device: str
    facts: Facts

    def takes(self, settings: Mapping[str, Any]) -> bool:
        """Whether a configuration with these settings would be started."""
        config = Config(model="imagined", device=self.device, **settings)
        try:
            check(resolve(config, self.facts), self.facts)
        except ConfigError:
            return False
        return True

    def takes_cache(self, dtype: str) -> bool:
        """The same of keys and values of a type."""
        return self.takes({"cache": convert({"dtype": dtype}, CacheConfig)})


def _facts(kind: Kind, kinds: Mapping[str, Kind]) -> Facts:
    facts = kind.facts
    exact = frozenset({"program"}) if facts.name == "cpu" else frozenset[str]()
    device = DeviceFacts(
        kind=facts.name,
        cores=8,
        total_bytes=80 * _GIB,
        available_bytes=64 * _GIB,
        fast_dtypes=facts.dtypes,
        runners=facts.runners,
        exact_runners=exact,
        attention=facts.attention,
    )
    offered: Mapping[str, AttentionFacts] = {
        name: attention_of(name, about, kinds.values()) for name, about in ATTENTION.items()
    }
    return Facts(
        devices={facts.name: device},
        model=_MODEL,
        attention=offered,
        draft=_MODEL,
        quantizations=frozenset(FORMATS),
        options={},
    )
