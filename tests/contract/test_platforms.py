"""The contract of platforms: those of this package, and one of another package."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.platform.apple import open_mps
from sylvan.runtime.platform.find import GROUP, load_kinds, open_platform
from sylvan.utils import plugins
from tests.support.fake_hpu import FakeHpu
from tests.support.fake_mps import FakeMps
from tests.support.fake_npu import FakeNpu

EXAMPLES = Path(__file__).parents[2] / "examples"
ASCEND, GAUDI = EXAMPLES / "platform_ascend", EXAMPLES / "platform_gaudi"
_LATE = EntryPoint("delayed", "tests.support.delayed:KIND", GROUP)


@pytest.fixture
def ascend(monkeypatch, tmp_path):
    """The kind of the example, as its `pyproject` names it, on a machine with an NPU."""
    kind = _example(ASCEND, monkeypatch)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/davinci0").touch()
    _installed(monkeypatch, "torch-npu")
    monkeypatch.setattr(torch, "npu", FakeNpu(), raising=False)
    monkeypatch.setattr(torch, "device", _device_of(torch.device))
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    yield type(kind)(tmp_path)
    _forget("sylvan_ascend")


@pytest.fixture
def gaudi(monkeypatch, tmp_path):
    """The same of the other example."""
    kind = _example(GAUDI, monkeypatch)
    vendor = tmp_path / "sys/class/accel/accel0/device/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x1da3\n")
    _installed(monkeypatch, "habana-torch-plugin")
    monkeypatch.setattr(torch, "hpu", FakeHpu(), raising=False)
    for name in ("habana_frameworks", "habana_frameworks.torch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    yield type(kind)(tmp_path)
    _forget("sylvan_gaudi")


def _example(folder, monkeypatch):
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    monkeypatch.syspath_prepend(str(folder / "src"))
    ((name, value),) = project["entry-points"][GROUP].items()
    return load_kinds([EntryPoint(name, value, GROUP)])[name]


def _installed(monkeypatch, package):
    found = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "2.9" if name == package else found(name)
    )


def _forget(package):
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


def _device_of(real):
    """torch knows no device `npu` before torch_npu has named one so."""

    class Kind(type):
        def __instancecheck__(cls, value):
            return isinstance(value, real)

        def __call__(cls, kind, *index):
            return real("privateuseone" if kind == "npu" else kind, *index)

    return Kind("device", (), {})


@pytest.fixture(params=["cpu", "delayed", "hpu", "jax", "mps", "npu"])
def platform(request):
    if request.param in ("npu", "hpu"):
        name = {"npu": "ascend", "hpu": "gaudi"}[request.param]
        return open_platform(request.getfixturevalue(name))
    kind = load_kinds([_LATE])[request.param]
    if request.param == "mps":
        monkeypatch = request.getfixturevalue("monkeypatch")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch, "mps", FakeMps())
        return open_mps(kind.facts)
    if why := kind.problem():
        pytest.skip(why)
    return open_platform(kind)


def test_work_is_done_in_order_when_an_event_after_it_is_waited_for(platform):
    stream, done = platform.stream(), []
    stream.run(lambda: done.append(1))
    stream.run(lambda: done.append(2))
    event = stream.event()

    event.wait()

    assert done == [1, 2]
    assert event.done()
    assert platform.stream() is stream


def test_another_stream_follows_an_event(platform):
    done = []
    platform.stream().run(lambda: done.append("steps"))
    beside = platform.side_stream()
    beside.after(platform.stream().event())
    beside.run(lambda: done.append("beside"))

    beside.event().wait()
    platform.stream().event().wait()

    assert set(done) == {"steps", "beside"}


def test_memory_is_in_bytes(platform):
    memory = platform.memory()

    assert 0 < memory.free <= memory.total
    platform.trim()
    assert platform.memory().total == memory.total


def test_the_peak_of_work_is_never_negative_and_the_work_is_done(platform):
    done = []

    assert platform.peak(lambda: done.append(1)) >= 0
    assert done == [1]


def test_a_graph_keeps_what_was_captured_or_there_is_none(platform):
    graph = platform.graph()
    if graph is None:
        assert "graph" not in platform.facts.runners or platform.facts.device_type == "cpu"
        return
    kept = torch.ones(2)

    assert graph.capture(lambda: kept).shape == (2,)
    platform.stream().run(graph.replay)
    platform.stream().event().wait()


def test_code_that_does_not_wait_runs_unsynced(platform):
    with platform.unsynced():
        pass


def test_a_chip_and_a_device_have_names(platform):
    assert platform.chip
    assert isinstance(platform.device, torch.device)
    assert platform.facts.float8_of("no such chip") is None or platform.facts.name == "cpu"


@pytest.mark.parametrize("name", load_kinds(()))
def test_facts_name_what_there_is(name):
    import sylvan.runtime.attention as backends

    facts = load_kinds(())[name].facts

    assert set(facts.attention) <= set(plugins.options(backends))
    assert set(facts.runners) <= {"program", "graph", "eager"}
    assert facts.dtypes <= {"float32", "float16", "bfloat16"}
    assert re.fullmatch(r"[\w.]+:\w+", facts.opener)
    assert not facts.lowering or re.fullmatch(r"[\w.]+:\w+", facts.lowering)


@pytest.mark.parametrize("name", load_kinds(()))
def test_what_is_not_there_is_one_sentence_with_a_way_out(name):
    why = load_kinds(())[name].problem()

    assert why is None or (not why.endswith(".") and "\n" not in why and "device=cpu" in why)


def test_a_mac_whose_torch_cannot_use_its_gpu_is_reported():
    if torch.backends.mps.is_available():
        pytest.skip("it can")

    with pytest.raises(ConfigError, match=r"device=mps: torch .* choose device=cpu"):
        open_mps(load_kinds(())["mps"].facts)


# ---- the example


def test_an_npu_is_opened_by_the_interface_of_torch_npu(ascend):
    platform = open_platform(ascend)

    assert platform.chip == "Ascend910B3"
    assert platform.facts.collective == "hccl"
    assert torch.npu.current is platform.stream().raw
    graph = platform.graph()
    graph.capture(lambda: torch.ones(1))
    graph.replay()
    assert graph._graph.replayed == 1


def test_a_machine_without_an_npu_reports_what_is_missing(ascend, tmp_path):
    assert ascend.problem() is None
    (tmp_path / "dev/davinci0").unlink()
    assert "npu-smi info" in ascend.problem()

    with pytest.raises(ConfigError, match=r"device=npu: no Ascend driver"):
        open_platform(ascend)


def test_an_npu_without_torch_npu_reports_what_is_missing(ascend, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)

    assert "torch-npu is not installed" in ascend.problem()


def test_a_torch_npu_that_is_too_old_or_broken_is_one_sentence(ascend, monkeypatch):
    monkeypatch.delattr(FakeNpu, "mem_get_info")
    with pytest.raises(ConfigError, match=r"no torch.npu.mem_get_info; install a newer one"):
        open_platform(ascend)

    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ConfigError, match=r"torch_npu cannot be imported: .* set_env.sh"):
        open_platform(ascend)


def test_a_gaudi_is_opened_by_the_interface_of_the_bridge(gaudi):
    platform = open_platform(gaudi)

    assert platform.chip == "GAUDI2"
    assert platform.facts.collective == "hccl"
    assert torch.hpu.current is platform.stream().raw
    assert platform.graph() is None


def test_a_gaudi_that_cannot_be_used_is_one_sentence(gaudi, monkeypatch, tmp_path):
    assert gaudi.problem() is None
    torch.hpu.available = False
    with pytest.raises(ConfigError, match=r"device=hpu: .* end the process that holds it"):
        open_platform(gaudi)
    monkeypatch.delattr(FakeHpu, "mem_get_info")
    with pytest.raises(ConfigError, match=r"no torch.hpu.mem_get_info; install a newer one"):
        open_platform(gaudi)
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch", None)
    with pytest.raises(ConfigError, match=r"cannot be imported: .* Intel's image"):
        open_platform(gaudi)
    (tmp_path / "sys/class/accel/accel0/device/vendor").write_text("0x1ae0\n")
    with pytest.raises(ConfigError, match="device=hpu: the driver habanalabs shows no Gaudi"):
        open_platform(gaudi)


@pytest.mark.slow
@pytest.mark.network
def test_the_example_installs_as_a_package(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*install, str(tmp_path), str(ASCEND)], check=True, timeout=300)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from sylvan.runtime.platform.find import load_kinds\n"
        "kinds = load_kinds()\n"
        "assert next(iter(kinds)) == 'npu', list(kinds)\n"
        "assert 'npu-smi' in kinds['npu'].problem()\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
