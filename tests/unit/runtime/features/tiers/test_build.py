"""A real model, its executor and a store: what is kept, and what refuses to start."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sylvan.config.tree import CacheConfig, TiersConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.build import build_scheduler
from tests.parity.checkpoints import SHAPE, write
from tests.support.kv import request
from tests.support.tiny import tiny_config, write_model

PROMPT = [(3 * i) % 200 + 5 for i in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class Served:
    """A scheduler that was built from a configuration."""

    def __init__(self, folder: Path, storage: Path | str | None, **changes) -> None:
        tiers = {"prefetch_min_tokens": 16} | changes.pop("tiers", {})
        config = tiny_config(
            folder,
            tiers=TiersConfig(storage=None if storage is None else str(storage), **tiers),
            cache=CacheConfig(page_size=16, max_tokens=2048, max_states=12),
            **changes,
        )
        self.outputs: list = []
        self.built = build_scheduler(config, self.outputs.extend)

    def ask(self, prompt=PROMPT, new: int = 8) -> tuple[list[int], int]:
        """Ids, and prompt tokens that came from the cache."""
        self.outputs.clear()
        scheduler = self.built.scheduler
        scheduler.add(request("a", prompt, new=new))
        until = time.monotonic() + 60
        while not scheduler.idle:
            assert time.monotonic() < until
            if not scheduler.step():
                time.sleep(0.001)
        assert scheduler.audit() == 0
        ids = [token for out in self.outputs for token in out.token_ids]
        return ids, self.outputs[-1].usage.cached_tokens

    @property
    def counts(self) -> dict:
        return self.built.stores.describe()["counts"]

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.built.close()


def test_the_store_serves_the_next_start_bit_by_bit(model, tmp_path):
    with Served(model, tmp_path / "kv") as first:
        wanted, cached = first.ask()
        assert cached == 0
    with Served(model, tmp_path / "kv") as second:
        assert second.ask() == (wanted, 192)
        assert second.counts["loaded_tokens"] == 192
        assert second.counts["stored_pages"] == 0


def test_a_damaged_page_is_computed_again(model, tmp_path):
    with Served(model, tmp_path / "kv") as first:
        wanted, _ = first.ask()
    pages = sorted((tmp_path / "kv" / "pages").glob("*/*/*"))
    for page in pages[::3]:
        data = bytearray(page.read_bytes())
        data[-5] ^= 16
        page.write_bytes(bytes(data))
    with Served(model, tmp_path / "kv") as second:
        tokens, cached = second.ask()
        assert tokens == wanted
        assert cached < 192
        assert second.counts["faults"]["torn"] >= 1


MODELS = {
    "windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 40}),
    "latent": ("DeepseekV2Config", {"kv_lora_rank": 16, "q_lora_rank": None}),
    "states": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
}


@pytest.mark.parametrize("name", MODELS)
def test_windows_latent_pages_and_states_go_through_too(name, tmp_path):
    folder = tmp_path / "model"
    write_family(name, folder)
    prompt = [token % 90 + 4 for token in PROMPT]
    with Served(folder, None, load_format="auto") as plain:
        wanted, _ = plain.ask(prompt)
    with Served(folder, tmp_path / "kv", load_format="auto") as first:
        assert first.ask(prompt) == (wanted, 0)
    with Served(folder, tmp_path / "kv", load_format="auto") as second:
        assert second.ask(prompt) == (wanted, 192)
        assert second.counts["failed_loads"] == 0


def write_family(name: str, folder: Path) -> None:
    import transformers

    kind, own = MODELS[name]
    config = getattr(transformers, kind)(**family_shape(name) | own)
    write(config, 3, folder)


def family_shape(name: str) -> dict:
    shape = SHAPE | {"num_hidden_layers": 2, "max_position_embeddings": 1024}
    if name == "windows":
        return shape | {"max_window_layers": 1}
    return shape


# ---- what refuses to start


def refused(model: Path, storage: Path | str | None, **changes) -> str:
    with pytest.raises(ConfigError) as found, Served(model, storage, **changes):
        raise AssertionError("it started")
    return str(found.value)


def test_a_store_of_another_model_is_refused(model, tmp_path):
    with Served(model, tmp_path / "kv"):
        pass
    told = refused(model, tmp_path / "kv", seed=7)
    assert "weights is dummy-0-" in told
    assert "sylvan cache prune --all" in told
    assert "dtype is float32, not bfloat16" in refused(model, tmp_path / "kv", dtype="bfloat16")


def test_a_place_that_cannot_be_used_is_refused_unless_best_effort(model, tmp_path):
    (tmp_path / "file").write_text("")
    told = refused(model, tmp_path / "file" / "kv")
    assert "tiers.storage=" in told
    assert "tiers.prefetch=best_effort" in told
    with Served(model, tmp_path / "file" / "kv", tiers={"prefetch": "best_effort"}) as served:
        assert served.ask()[1] == 0
        assert served.built.stores.describe()["storage"] is None


def test_settings_that_make_no_sense_are_refused(model, tmp_path):
    told = refused(model, tmp_path / "kv", tiers={"key_file": str(tmp_path / "none")})
    assert "cannot be read" in told
    told = refused(model, "redis://127.0.0.1/0", tiers={"max_bytes": 4096})
    assert "maxmemory" in told


def test_an_encrypted_store_is_read_with_its_key_only(model, tmp_path):
    keys = [tmp_path / "one", tmp_path / "two"]
    for number, path in enumerate(keys):
        path.write_text(f"{number:064}")
        path.chmod(0o600)
    sealed = {"key_file": str(keys[0])}
    with Served(model, tmp_path / "kv", tiers=sealed) as first:
        wanted, _ = first.ask()
    with Served(model, tmp_path / "kv", tiers=sealed) as again:
        assert again.ask() == (wanted, 192)
    for other in ({}, {"key_file": str(keys[1])}):
        with Served(model, tmp_path / "kv", tiers=other) as served:
            assert served.ask() == (wanted, 0)
            assert served.counts["faults"]["sealed"] >= 1
