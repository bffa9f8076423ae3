"""Tables of supported features by kind of device, for `sylvan chips` and the documentation.

They are derived by checking configurations against an imagined machine with one device of each
kind, so no device is needed and nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import convert

from sylvan.config.check import check
from sylvan.config.facts import ON_JAX, AttentionFacts, CheckpointInfo, DeviceFacts, Facts
from sylvan.config.resolve import resolve
from sylvan.config.tree import CacheConfig, Config, LoraConfig, ParallelConfig, SpeculativeConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.facts import ATTENTION, attention_of
from sylvan.runtime.platform.facts import DeviceKind
from sylvan.runtime.platform.find import load_kinds

FORMATS = ("w8a8", "w4a8", "w4a16", "fp8")
_DTYPES = ("float32", "bfloat16", "float16")
_KEYS = ("model", "int8", "int4", "fp8_e4m3")
_GIB = 1 << 30
_LATENT_HEAD = 576  # of DeepSeek V2 and V3
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
        name: Value of `device`.
        state: Whether it was ever run.
        cells: Accepted values by column of `COLUMNS`; empty: refused.
        missing: Why it cannot be used on this machine; empty: it can.
        how: How to get what is missing.
    """

    name: str
    state: str
    cells: Mapping[str, str]
    missing: str
    how: str


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One attention backend.

    Attributes:
        name: Value of `attention`.
        cells: By column of `ATTENTION_COLUMNS`.
    """

    name: str
    cells: Mapping[str, str]


ATTENTION_COLUMNS = (
    *(
        "devices",
        "page sizes",
        "dtypes",
        "KV dtypes",
        "largest head",
        "MLA",
        "runners",
        "speculation",
    ),
    "same bits in any batch",
)
COLUMNS = (
    "dtypes",
    "formats",
    "KV dtypes",
    "attention",
    "runner",
    "parallel",
    "speculation",
    "LoRA",
)


def chip_rows(kinds: Mapping[str, DeviceKind] | None = None) -> Sequence[ChipRow]:
    """Return a row for each kind of device, CPUs first; `kinds` replaces the installed ones."""
    known = load_kinds() if kinds is None else kinds
    names = sorted(known, key=lambda name: (name != "cpu", name))
    return [_row(known[name], known) for name in names]


def attention_rows(kinds: Mapping[str, DeviceKind] | None = None) -> Sequence[AttentionRow]:
    """Return a row for each attention backend, with what it supports on some device."""
    known = load_kinds() if kinds is None else kinds
    found = {name: attention_of(name, about, known.values()) for name, about in ATTENTION.items()}
    return [AttentionRow(name, _of_backend(name, about, known)) for name, about in found.items()]


def _of_backend(
    name: str, about: AttentionFacts, kinds: Mapping[str, DeviceKind]
) -> Mapping[str, str]:
    cases = [_Case(device, _facts(kinds[device], kinds)) for device in about.devices & {*kinds}]
    latent = [case.with_heads(_LATENT_HEAD) for case in cases]

    def any_takes(those: Iterable[_Case], **settings: Any) -> bool:
        return any(case.takes({"attention": name, **settings}) for case in those)

    pages = about.page_sizes
    return {
        "devices": _joined(sorted(about.devices & {*kinds})),
        "page sizes": "any"
        if pages is None
        else f"{min(pages)}, {2 * min(pages)}, ... {max(pages)}",
        "dtypes": _joined(kind for kind in _DTYPES if any_takes(cases, dtype=kind)),
        "KV dtypes": _joined(
            kind for kind in _KEYS if any_takes(cases, cache=convert({"dtype": kind}, CacheConfig))
        ),
        "largest head": str(about.max_head_dim or "any"),
        "MLA": "yes" if any_takes(latent) else "",
        "runners": _joined(
            runner for runner in ("program", "graph", "eager") if any_takes(cases, runner=runner)
        ),
        "speculation": "yes" if any_takes(cases, speculative=_speculative("ngram")) else "",
        "same bits in any batch": "yes" if any_takes(cases, deterministic=True) else "",
    }


def _speculative(algorithm: str) -> SpeculativeConfig:
    return convert({"algorithm": algorithm, "draft_model": "heads"}, SpeculativeConfig)


def _row(kind: DeviceKind, kinds: Mapping[str, DeviceKind]) -> ChipRow:
    case = _Case(kind.facts.name, _facts(kind, kinds))
    cells = {
        "dtypes": _joined(name for name in _DTYPES if case.takes({"dtype": name})),
        "formats": _joined(name for name in FORMATS if case.takes({"quantization": name})),
        "KV dtypes": _joined(name for name in _KEYS if case.takes_cache(name)),
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
                "groups": ParallelConfig(
                    tp=1 if kind.facts.name in ON_JAX else 2,
                    devices=2 if kind.facts.name in ON_JAX else 1,
                    attention_dp=2,
                ),
            }.items()
            if case.takes({"parallel": wanted})
        ),
        "speculation": _joined(
            name for name in ("ngram", "eagle3") if case.takes({"speculative": _speculative(name)})
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
        """Whether a configuration with these settings passes the checks of a start."""
        config = Config(model="imagined", device=self.device, **settings)
        try:
            check(resolve(config, self.facts), self.facts)
        except ConfigError:
            return False
        return True

    def with_heads(self, size: int) -> _Case:
        """Like `takes`, for a model whose heads have this many columns."""
        model = replace(self.facts.model, head_dim=size)
        return _Case(self.device, replace(self.facts, model=model))

    def takes_cache(self, dtype: str) -> bool:
        """Like `takes`, for keys and values of a type."""
        return self.takes({"cache": convert({"dtype": dtype}, CacheConfig)})


def _facts(kind: DeviceKind, kinds: Mapping[str, DeviceKind]) -> Facts:
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
