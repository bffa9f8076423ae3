from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

import sylvan
from sylvan.config.fields import fields, get, replaced, sections
from sylvan.config.tree import Config, LoraConfig, SchedulerConfig, ServerConfig
from sylvan.config.values import Secret

PACKAGE = Path(sylvan.__file__).parent
BUDGET = 215  # raising it is a decision


def test_tree_stays_within_its_budget():
    assert len(fields()) <= BUDGET


@pytest.mark.parametrize("path", fields())
def test_every_field_is_documented(path):
    doc = fields()[path].doc

    assert doc
    assert doc[0].isupper() or doc[0] == "`"
    assert doc.endswith(".")


def test_every_section_is_documented():
    assert all(info.doc for info in sections().values())


JUDGED_BY_RULES = {  # read while resolving and checking
    "quantization",
    "deterministic",
    "speculative.draft_model",
    "speculative.num_draft_tokens",
}


def test_every_field_is_read_by_something():
    sources = (path for path in PACKAGE.rglob("*.py") if path.parent.name != "config")
    text = "\n".join(path.read_text() for path in sources)

    unread = {path for path in fields() if not re.search(rf"\.{path.rpartition('.')[2]}\b", text)}

    assert unread - JUDGED_BY_RULES == set()


def test_sections_reject_misspelt_fields():
    with pytest.raises(TypeError, match="pagesize"):
        ServerConfig(pagesize=1)


def test_tree_is_immutable():
    with pytest.raises(AttributeError):
        Config().model = "other"


def test_inflight_follows_overlap():
    assert SchedulerConfig(overlap="on").inflight == 2
    assert SchedulerConfig(overlap="off").inflight == 1
    with pytest.raises(AssertionError):
        _ = SchedulerConfig().inflight


def test_get_is_none_inside_an_absent_section():
    assert get(Config(), "lora.max_rank") is None
    assert get(Config(lora=LoraConfig()), "lora.max_rank") == "auto"


def test_replaced_changes_only_what_is_named():
    config = replaced(Config(), {"model": "m", "cache.page_size": 8, "cache.eviction": "lfu"})

    assert (config.model, config.cache.page_size, config.cache.eviction) == ("m", 8, "lfu")
    assert config.scheduler == Config().scheduler


@pytest.fixture
def keyed():
    key = Secret("open sesame")
    return Config(server=ServerConfig(api_key=key, admin_api_key=key, ssl_keyfile_password=key))


@pytest.mark.parametrize(
    "show", [repr, str, "{}".format, "{!r}".format], ids=["repr", "str", "format", "format repr"]
)
def test_secrets_never_show(keyed, show):
    assert "sesame" not in show(keyed)
    assert "sesame" not in show(keyed.server.api_key)


@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
def test_secrets_cannot_be_encoded(keyed, encode):
    with pytest.raises(TypeError):
        encode(keyed)


def test_secrets_cannot_be_reduced(keyed):
    with pytest.raises(TypeError, match="serialised"):
        keyed.server.api_key.__reduce__()


def test_secrets_compare_by_text():
    assert Secret("a").matches("a")
    assert not Secret("a").matches("b")
    assert Secret("a") == Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a"), Secret("b")}) == 2
