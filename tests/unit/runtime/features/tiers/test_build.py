"""A real model, its executor and a store: what is kept, and what refuses to start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import LogprobOptions
from tests.parity.checkpoints import SHAPE, write
from tests.support.tier_servers import PROMPT, Served
from tests.support.tiny import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


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
    "latent": (
        "DeepseekV2Config",
        {"kv_lora_rank": 16, "q_lora_rank": None, "moe_intermediate_size": 24},
    ),
    "states": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
}


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", *MODELS])
@pytest.mark.parametrize("stored", [False, True])
def test_what_the_host_tier_brings_back_has_the_same_bits(name, stored, model, tmp_path):
    folder, prompt = model, [token % 90 + 4 for token in PROMPT]
    changes = {}
    if name != "plain":
        folder, changes = tmp_path / "model", {"load_format": "auto"}
        write_family(name, folder)
    with Served(folder, None, **changes) as plain:
        wanted, _ = plain.ask(prompt)
    tiers = {"host_ratio": 4.0}
    storage = tmp_path / "kv" if stored else None
    with Served(folder, storage, max_tokens=416, tiers=tiers, **changes) as served:
        assert served.ask(prompt) == (wanted, 0)
        for number in range(3):
            served.ask([(token * 7 + number) % 90 + 4 for token in PROMPT])
        assert served.ask(prompt) == (wanted, 192)
        assert served.counts["host_loaded_tokens"] == 192
        assert served.counts["loaded_tokens"] == served.counts["failed_loads"] == 0
        assert (served.counts["stored_pages"] > 0) == stored


def test_a_host_tier_of_8_bits_brings_back_nearly_the_same(model, tmp_path):
    tiers = {"host_ratio": 4.0, "host_dtype": "int8"}
    wish = {"logprobs": LogprobOptions(token_ids=tuple(range(20, 40))), "new": 1}
    with Served(model, tmp_path / "kv", max_tokens=416, tiers=tiers) as served:
        served.ask(**wish)
        wanted = served.outputs[-1].logprobs.chosen_logprobs
        for number in range(3):
            served.ask([(token * 7 + number) % 90 + 4 for token in PROMPT])
        assert served.ask(**wish)[1] == 192
        found = served.outputs[-1].logprobs.chosen_logprobs
        assert served.counts["host_loaded_tokens"] == 192
        np.testing.assert_allclose(found, wanted, atol=0.05)
    assert "kv_dtype is model, int8 in host memory, not model" in refused(model, tmp_path / "kv")


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


def test_host_tiers_of_impossible_sizes_are_refused(model):
    told = refused(model, None, tiers={"host_bytes": 1 << 60})
    assert "tiers.host_bytes=1152921504606846976 takes" in told
    assert "no page of each KV group fits" in refused(model, None, tiers={"host_bytes": 16})


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
