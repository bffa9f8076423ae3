"""A Ray cluster of two nodes on this machine starts the ranks of a server's second machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sylvan.cli.ray_nodes import node_settings, resources
from sylvan.config.fields import replaced
from sylvan.config.tree import CacheConfig, Config, LoraConfig, ParallelConfig, ServerConfig
from tests.support.server_processes import FLAGS, completion, started, waited
from tests.support.tiny import write_model

PLACED = ("--tp", 2, "--nnodes", 2, "--placement", "ray")


def test_other_machines_get_the_settings_without_what_is_of_the_first() -> None:
    given = Config(
        model="m",
        cache=CacheConfig(page_size=32),
        lora=LoraConfig(),
        server=ServerConfig(port=1),
        parallel=ParallelConfig(tp=2, nodes=2, placement="ray"),
    )
    tree = node_settings(given, replaced(given, {"parallel.address": "10.0.0.1:5"}))

    assert tree == {
        "model": "m",
        "cache": {"page_size": 32},
        "lora": {},
        "parallel": {"tp": 2, "nodes": 2, "address": "10.0.0.1:5"},
    }


def test_ranks_with_gpus_ask_for_them() -> None:
    given = Config(threads=2, parallel=ParallelConfig(tp=4, nodes=2))

    assert resources(replaced(given, {"device": "cpu"})) == {"CPU": 4}
    assert resources(replaced(given, {"device": "cuda"})) == {"CPU": 4, "GPU": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes with two cores each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    made.add_node(num_cpus=2)
    yield made.address
    made.shutdown()


def keepers() -> list[psutil.Process]:
    """Processes that have ranks of other machines than the first."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "--node-rank" in words and any("/node-1.json" in word for word in words):
            found.append(process)
    return found


@pytest.mark.slow
def test_ray_starts_the_second_machine_and_starts_it_again(model: Path, cluster: str) -> None:
    served = "serve", model, *FLAGS, "--runner", "eager"
    with started(("sylvan",), *served) as alone:
        expected = completion(alone.ready())
    with started(("sylvan",), *served, *PLACED, environ={"RAY_ADDRESS": cluster}) as first:
        url = first.ready()
        assert completion(url) == expected
        [lost] = keepers()

        os.kill(lost.pid, signal.SIGKILL)

        waited(lambda: [p for p in keepers() if p.pid != lost.pid], "it was not started again")
        assert completion(url) == expected
        assert first.stop() == 0
    waited(lambda: not keepers(), "the second machine did not stop")


@pytest.mark.slow
def test_a_cluster_without_room_is_refused_in_a_sentence(model: Path, cluster: str) -> None:
    given = [*FLAGS, "--nnodes", "3", "--tp", "3", "--placement", "ray"]
    for flag, value in (("--threads", "2"), ("--dist-timeout", "1")):
        given[given.index(flag) + 1] = value
    with started(("sylvan",), "serve", model, *given, environ={"RAY_ADDRESS": cluster}) as first:
        assert first.process.wait(120) == 2
        assert "the cluster has no room for 3 machines of 2 cores each" in first.printed


@pytest.mark.slow
def test_a_cluster_that_does_not_run_is_refused_in_a_sentence(model: Path) -> None:
    pytest.importorskip("ray")
    environ = {"RAY_ADDRESS": "127.0.0.1:1"}
    with started(("sylvan",), "serve", model, *FLAGS, *PLACED, environ=environ) as first:
        assert first.process.wait(120) == 2
        assert "no Ray cluster answers" in first.printed


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from sylvan.cli import ray_nodes
    from sylvan.protocol.errors import ConfigError

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^parallel\.placement=ray: Ray is not installed: pip"):
        ray_nodes._connect()
