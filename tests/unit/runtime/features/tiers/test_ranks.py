"""Ranks that share a model keep and store their parts of its KV: the answers of one rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from sylvan.config.tree import ParallelConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.storage.api import kind_of
from tests.support.rank_threads import RankThreads
from tests.support.tier_servers import PROMPT, Served
from tests.support.tiny import write_model
from tests.unit.runtime.features.tiers.test_build import MODELS, write_family


class TwoRanks(Served):
    """A scheduler over two ranks."""

    def __init__(self, folder: Path, storage: Path | str | None, **changes) -> None:
        self._ranks = RankThreads()
        parallel = ParallelConfig(tp=2)
        super().__init__(
            folder, storage, parallel=parallel, runner="eager", ranks=self._ranks, **changes
        )

    def __exit__(self, *_) -> None:
        super().__exit__(*_)
        self._ranks.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def wanted(model) -> list[int]:
    with Served(model, None, runner="eager") as alone:
        return alone.ask()[0]


def test_each_rank_stores_its_part_and_the_next_start_finds_it(model, wanted, tmp_path):
    with TwoRanks(model, tmp_path / "kv") as first:
        assert first.ask() == (wanted, 0)
        assert first.counts["stored_pages"] == 12
    pages = [*(tmp_path / "kv" / "pages").glob("*/*/*")]
    assert Counter(kind_of(page.name) for page in pages) == {"kvr0": 12, "kvr1": 12}

    with TwoRanks(model, tmp_path / "kv") as second:
        assert second.ask() == (wanted, 192)
        assert second.counts["loaded_tokens"] == 192
        assert second.counts["failed_loads"] == 0

    with pytest.raises(ConfigError, match=r"shards is \(2, 0\), not \(1, 0\)"):
        Served(model, tmp_path / "kv", runner="eager")


def test_what_one_rank_has_lost_is_computed_by_all(model, wanted, tmp_path):
    with TwoRanks(model, tmp_path / "kv") as first:
        first.ask()
    pages = sorted((tmp_path / "kv" / "pages").glob("*/*/*.kvr1"))
    for page in pages[::3]:
        data = bytearray(page.read_bytes())
        data[-5] ^= 16
        page.write_bytes(bytes(data))
    with TwoRanks(model, tmp_path / "kv") as second:
        tokens, cached = second.ask()
        assert tokens == wanted
        assert cached < 192
        assert second.counts["faults"]["torn"] >= 1


def test_the_host_tier_brings_back_the_parts_of_all(model, wanted):
    with TwoRanks(model, None, max_tokens=416, tiers={"host_ratio": 4.0}) as served:
        assert served.ask() == (wanted, 0)
        for number in range(3):
            served.ask([(token * 7 + number) % 90 + 4 for token in PROMPT])
        assert served.ask() == (wanted, 192)
        assert served.counts["host_loaded_tokens"] == 192


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_windows_latent_pages_and_states_go_through_too(name, tmp_path):
    folder = tmp_path / "model"
    write_family(name, folder)
    prompt = [token % 90 + 4 for token in PROMPT]
    with Served(folder, None, load_format="auto", runner="eager") as plain:
        wanted, _ = plain.ask(prompt)
    with TwoRanks(folder, tmp_path / "kv", load_format="auto") as first:
        assert first.ask(prompt) == (wanted, 0)
    with TwoRanks(folder, tmp_path / "kv", load_format="auto") as second:
        assert second.ask(prompt) == (wanted, 192)
        assert second.counts["failed_loads"] == 0
