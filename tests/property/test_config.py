"""Flags, tree and files say the same thing."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

from sylvan.config.fields import fields
from sylvan.config.flags import parse_flags
from sylvan.config.load import dump, load
from sylvan.config.sources import from_keywords, gather, read_file
from sylvan.protocol.errors import ConfigError

TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12).filter(
    lambda text: text.lower() not in {"none", "null", "auto"}
)
NAMES = st.text(st.characters(categories=["Ll"]), min_size=1, max_size=6)


def member_values(member):
    """Values of one alternative of a field's type, as its Python value."""
    base, meta = member.base, member.meta
    low = next((b for b in (meta and meta.ge, meta and meta.gt) if b is not None), None)
    high = next((b for b in (meta and meta.le, meta and meta.lt) if b is not None), None)
    if base is bool:
        return st.booleans()
    if base is int:
        return st.integers(low if low is not None else -(2**40), high or 2**40)
    if base is float:
        return st.floats(
            low if low is not None else -1e6,
            high or 1e6,
            exclude_min=bool(meta and meta.gt is not None),
            exclude_max=bool(meta and meta.lt is not None),
        )
    if base is str:
        return st.from_regex(meta.pattern, fullmatch=True) if meta and meta.pattern else TEXT
    return None


def field_values(field):
    kinds = [values for m in field.members if (values := member_values(m)) is not None]
    words = [st.just(word) for word in field.choices]
    if field.path == "server.cors_origins":
        kinds.append(st.lists(NAMES, max_size=3).map(tuple))
    if field.path == "lora.adapters":
        kinds.append(st.dictionaries(NAMES, NAMES, min_size=1, max_size=3))
    if field.type == tuple[float, ...]:
        bounds = st.sets(st.floats(0.001, 1e6), max_size=3)
        kinds.append(bounds.map(lambda found: tuple(sorted(found))))
    return st.one_of(*kinds, *words)


SETTABLE = {path: f for path, f in fields().items() if not f.is_secret}
ALWAYS = {"speculative.algorithm"}  # its section needs it
TREES = st.sets(st.sampled_from(sorted(SETTABLE)), max_size=12).flatmap(
    lambda paths: st.fixed_dictionaries({p: field_values(SETTABLE[p]) for p in paths | ALWAYS})
)


def flag_text(value):
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


@given(TREES)
def test_flags_to_tree_to_yaml_to_tree_is_the_same_tree(values):
    words = [f"{fields()[path].flag}={flag_text(value)}" for path, value in values.items()]
    from_flags = load(parse_flags(words).given.settings).config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(dump(from_flags), allow_unicode=True))
        from_file = load(read_file(file).settings).config

    assert from_file == from_flags


@given(TREES)
def test_keywords_and_environment_mean_the_same(values):
    nested: dict[str, object] = {}
    for path, value in values.items():
        nested[path.replace(".", "__")] = value
    environ = {fields()[path].variable: flag_text(value) for path, value in values.items()}

    from_python = gather(from_keywords(nested), environ={}).config
    from_environment = gather(from_keywords({}), environ=environ).config

    assert from_python == from_environment


@given(st.lists(st.text(max_size=20), max_size=6))
def test_any_command_line_parses_or_is_refused_with_a_config_error(words):
    with contextlib.suppress(ConfigError):
        load(parse_flags(words).given.settings)
