"""The configuration trees: runtimes (`serve`), gateways (`route`), load tests, simulations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from sylvan.config.aliases import Alias, aliases
from sylvan.config.bench import BenchConfig, OfflineConfig, OneBatchConfig
from sylvan.config.bench_aliases import batch_aliases, bench_aliases, offline_aliases
from sylvan.config.fields import Field, SectionInfo, fields, sections
from sylvan.config.route import RouteConfig
from sylvan.config.route_aliases import route_aliases
from sylvan.config.simulate import SimulateConfig
from sylvan.config.simulate_aliases import simulate_aliases
from sylvan.config.tree import Config, Section

Root = TypeVar("Root", bound=Section)


@dataclass(frozen=True, slots=True)
class Schema(Generic[Root]):
    """A tree of settings, and the aliases of its fields.

    Attributes:
        root: Type of the tree.
        aliases: Other names at the top level of flags, files and keywords.
        prefix: Prefix of its environment variables.
    """

    root: type[Root]
    aliases: Mapping[str, Alias]
    prefix: str

    @property
    def fields(self) -> Mapping[str, Field]:
        """All fields by path."""
        return fields(self.root)

    @property
    def sections(self) -> Mapping[str, SectionInfo]:
        """All sections by path; the root is ""."""
        return sections(self.root)

    def variable(self, path: str) -> str:
        """The environment variable of a field or section."""
        return self.prefix + path.replace(".", "__").upper()


SERVE: Schema[Config] = Schema(Config, aliases(), "SYLVAN_")
ROUTE: Schema[RouteConfig] = Schema(RouteConfig, route_aliases(), "SYLVAN_ROUTE_")
BENCH: Schema[BenchConfig] = Schema(BenchConfig, bench_aliases(), "SYLVAN_BENCH_")
OFFLINE: Schema[OfflineConfig] = Schema(
    OfflineConfig, {**offline_aliases(), **aliases()}, "SYLVAN_BENCH_"
)
ONE_BATCH: Schema[OneBatchConfig] = Schema(
    OneBatchConfig, {**batch_aliases(), **aliases()}, "SYLVAN_BENCH_"
)
SIMULATE: Schema[SimulateConfig] = Schema(SimulateConfig, simulate_aliases(), "SYLVAN_SIMULATE_")
