from __future__ import annotations

import importlib

import pytest

import sylvan.runtime.attention
from sylvan.config.check import check
from sylvan.config.parse import PLUG_INS
from sylvan.config.resolve import resolve
from sylvan.config.tree import Config
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.facts import ATTENTION, gather_facts
from sylvan.runtime.platform.find import load_kinds
from sylvan.utils import plugins
from tests.support.tiny import write_model


@pytest.fixture
def facts(tmp_path):
    return gather_facts(Config(model=str(write_model(tmp_path)), device="cpu"))


def caps_of(name):
    module = importlib.import_module(f"sylvan.runtime.attention.{name}")
    found = [v.caps for v in vars(module).values() if isinstance(v, type) and hasattr(v, "caps")]
    return found[0]


@pytest.mark.parametrize("name", ATTENTION)
def test_facts_of_attention_are_its_capabilities(name):
    facts, caps = ATTENTION[name], caps_of(name)

    assert facts.devices == caps.devices
    assert facts.page_sizes == caps.page_sizes
    assert facts.batch_invariant == caps.batch_invariant
    assert facts.runners == caps.runners
    assert facts.kv_dtypes == caps.kv_dtypes
    assert facts.dtypes == caps.dtypes
    assert facts.max_head_dim == caps.max_head_dim
    assert facts.page_sizes is None or facts.page_size in facts.page_sizes


def test_attention_that_auto_chooses_exists():
    assert set(ATTENTION) <= set(plugins.options(sylvan.runtime.attention))


def test_options_of_all_plug_ins_are_known(facts):
    assert set(facts.options) == set(PLUG_INS)
    assert "lpm" in facts.options["scheduler.policy"]
    assert "lru" in facts.options["cache.eviction"]


def test_attention_that_computes_nothing_is_not_offered(tmp_path):
    config = Config(model=str(write_model(tmp_path)), device="cpu", attention="null")
    facts = gather_facts(config)

    assert {"native", "torch", "reference"} <= set(facts.options["attention"])
    with pytest.raises(ConfigError, match="attention: unknown 'null'"):
        check(resolve(config, facts), facts)


def test_defaults_can_be_served_here(facts):
    resolved = resolve(Config(model=facts.model.name), facts)

    check(resolved, facts)
    assert resolved.config.device == "cpu"
    assert resolved.plan.num_pages > 0


def test_a_gpu_that_is_not_there_is_refused_in_one_sentence(tmp_path):
    kind = load_kinds()["cuda"]
    if kind.problem() is None:
        pytest.skip("there is a GPU")
    config = Config(model=str(write_model(tmp_path)), device="cuda")
    facts = gather_facts(config)

    with pytest.raises(ConfigError, match=r"^device=cuda: .* choose device=cpu or auto$"):
        check(resolve(config, facts), facts)


def test_attention_that_is_not_installed_says_how_to_get_it(tmp_path):
    config = Config(model=str(write_model(tmp_path)), device="cpu", attention="flashinfer")
    facts = gather_facts(config)
    if "flashinfer" not in facts.not_installed:
        pytest.skip("it is installed")

    with pytest.raises(ConfigError, match=r"pip install 'sylvan\[flashinfer\]'"):
        check(resolve(config, facts), facts)


def test_preferences_of_devices_are_backends():
    named = {name for kind in load_kinds().values() for name in kind.facts.attention}

    assert named <= set(ATTENTION)
