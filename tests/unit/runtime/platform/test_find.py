from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint

import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.find import GROUP, load_kinds, open_platform
from tests.support.delayed import DelayedPlatform


def entry(name, value="tests.support.delayed:KIND"):
    return EntryPoint(name, value, GROUP)


def test_kinds_of_this_package_are_called_what_they_are():
    kinds = load_kinds(())

    assert set(kinds) == {"cpu", "cuda", "jax", "mps", "rocm", "tpu", "xpu"}
    assert all(kind.facts.name == name for name, kind in kinds.items())
    assert [n for n, k in kinds.items() if k.facts.automatic] == ["cuda", "rocm"]


def test_kinds_of_other_packages_come_first():
    kinds = load_kinds([entry("delayed")])

    assert next(iter(kinds)) == "delayed"
    assert isinstance(open_platform(kinds["delayed"]), DelayedPlatform)


def test_kinds_that_cannot_be_imported_are_named():
    with pytest.raises(ConfigError, match=r"'odd' .* 'nowhere:KIND'"):
        load_kinds([entry("odd", "nowhere:KIND")])
    with pytest.raises(ConfigError, match="the name of a built-in one"):
        load_kinds([entry("cuda")])


@dataclass(frozen=True)
class _Misfit:
    facts: PlatformFacts

    def problem(self) -> str | None:
        return None


def test_packages_that_do_not_fit_together_are_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "misfit.py").write_text('raise RuntimeError("jaxlib is version 2, jax 1")')
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = load_kinds(())["jax"]
    facts = replace(kind.facts, opener="misfit:open")

    with pytest.raises(ConfigError, match=r"device=jax: .*: jaxlib is version 2, jax 1; reinstall"):
        open_platform(_Misfit(facts))


def test_the_cpu_is_a_platform_without_delay():
    platform = open_platform(load_kinds(())["cpu"])
    done = []

    platform.stream().run(lambda: done.append(1))

    assert done == [1]
    assert platform.stream().event().done()
    platform.stream().event().wait()
    assert platform.graph() is None
    assert platform.memory().total >= platform.memory().free > 0
    assert platform.peak(lambda: done.append(2)) == 0
    assert done == [1, 2]
