"""`sylvan serve --placement ray`: the other machines of a server are actors of a Ray cluster.

A placement group has a bundle for each machine; the first one is pinned to this machine, node 0.
Each of the others runs an actor that keeps `sylvan serve --node-rank N` running. Ray starts an
actor if its machine is lost, and the ranks join again as they do when started by hand.

Source: docs.ray.io, "Placement Groups" and "Actor Fault Tolerance".
"""

from __future__ import annotations

import importlib
import json
import logging
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sylvan.cli.settings import Settings
from sylvan.config import Config
from sylvan.config.address import split_address
from sylvan.config.env import variable, without_settings
from sylvan.config.fields import replaced
from sylvan.config.load import dump
from sylvan.config.parallel import GPUS
from sylvan.config.schema import SERVE
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.restart import Backoff

logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_START = "Start a cluster with ray start --head, or correct RAY_ADDRESS"
_PIN = 0.001
"""Requested amount of a machine's own resource: selects the machine without reserving much."""


class NodeKeeper:
    """The actor: keeps the process of one machine running."""

    def run(self, settings: Mapping[str, Any], node: int) -> int:
        """Run `sylvan serve` as node `node` until node 0 stops; return its exit code.

        A process that fails is restarted, as `RestartPolicy` allows. It ends with the actor.

        Args:
            settings: The configuration, as a tree.
            node: Number of the machine.
        """
        backoff = Backoff()
        with tempfile.TemporaryDirectory(prefix="sylvan-") as folder:
            path = Path(folder) / f"node-{node}.json"
            path.touch(mode=0o600)
            path.write_text(json.dumps(settings))
            command = [sys.executable, "-m", "sylvan", "serve", "--config", str(path)]
            command += ["--node-rank", str(node), "--quiet", "--until-eof"]
            while True:
                with subprocess.Popen(
                    command, stdin=subprocess.PIPE, env=without_settings()
                ) as process:
                    code = process.wait()
                delay_s = None if code == 0 else backoff.next_delay_s()
                if delay_s is None:
                    return code
                logger.error("node %d ended (%d); it is started again", node, code)
                time.sleep(delay_s)


@dataclass(frozen=True, slots=True)
class _Cluster:
    """A connection to Ray."""

    ray: Any
    util: Any
    strategies: Any


@contextmanager
def place_nodes(settings: Settings) -> Iterator[Settings]:
    """Start the other machines on Ray, if requested; yield the settings of node 0.

    Raises:
        ConfigError: Ray is not installed or not running, or has no room; says what to do.
    """
    config = settings.resolved.config
    if config.parallel.placement != "ray" or config.parallel.node_rank > 0:
        yield settings
        return
    cluster = _connect()
    try:
        address = config.parallel.address or _free_address(cluster.util.get_node_ip_address())
        resolved = replaced(config, {"parallel.address": address})
        group = _reserve(cluster, resolved)
        try:
            actors = _start(cluster, group, settings.loaded.config, resolved)
            try:
                yield replace(settings, resolved=replace(settings.resolved, config=resolved))
            finally:
                for actor in actors:
                    cluster.ray.kill(actor)
        finally:
            cluster.util.remove_placement_group(group)
    finally:
        cluster.ray.shutdown()


def node_settings(given: Config, resolved: Config) -> dict[str, Any]:
    """Return the configuration of a machine other than node 0, as a tree.

    Args:
        given: What the operator gave for node 0.
        resolved: The same with an address.
    """
    tree = dump(given, defaults=False)
    for path, info in SERVE.sections.items():
        if info.optional and getattr(given, path) is not None:
            tree.setdefault(path, {})  # the flag is on if it is present
    tree.pop("server", None)
    parallel = tree.setdefault("parallel", {})
    parallel.pop("placement", None)
    parallel["address"] = resolved.parallel.address
    tree["model"] = resolved.model
    return tree


def _connect() -> _Cluster:
    try:
        ray, util, strategies = (
            importlib.import_module(name)
            for name in ("ray", "ray.util", "ray.util.scheduling_strategies")
        )
    except ImportError:
        raise ConfigError(
            "parallel.placement=ray: Ray is not installed: pip install 'sylvan[ray]'"
        ) from None
    _check_address(variable("RAY_ADDRESS") or "")
    try:
        ray.init(address="auto", configure_logging=False, log_to_driver=True)
    except (ConnectionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"parallel.placement=ray: {reason} {_START}") from None
    return _Cluster(ray, util, strategies)


def _check_address(address: str) -> None:
    """Reject an address without a listener: Ray would try it for minutes."""
    if "://" in address:
        raise ConfigError(
            f"parallel.placement=ray: RAY_ADDRESS={address}: node 0 is a machine of the cluster "
            "itself; give HOST:PORT"
        )
    if address in ("", "auto"):
        return
    try:
        with socket.create_connection(split_address(address), _CONNECT_S):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"parallel.placement=ray: no Ray cluster answers at RAY_ADDRESS={address}: {error}. "
            f"{_START}"
        ) from None


def _free_address(host: str) -> str:
    with socket.socket() as sock:
        sock.bind((host, 0))
        return f"{host}:{sock.getsockname()[1]}"


def _reserve(cluster: _Cluster, config: Config) -> Any:
    """Reserve a placement group with cores, and GPUs if any, for the ranks of each machine."""
    parallel = config.parallel
    assert parallel.address is not None
    each = resources(config)
    host = cluster.util.get_node_ip_address()
    bundles: list[dict[str, float]] = [dict(each) for _ in range(parallel.nodes)]
    bundles[0][f"node:{host}"] = _PIN
    group = cluster.util.placement_group(bundles, strategy="SPREAD")
    if not group.wait(parallel.join_timeout_s):
        cluster.util.remove_placement_group(group)
        free = cluster.ray.available_resources()
        raise ConfigError(
            f"parallel.placement=ray: the cluster has no room for {parallel.nodes} machines of "
            f"{_listed(each)} each within {parallel.join_timeout_s:g} s "
            f"({_listed({name: free.get(name, 0) for name in each})} are free); "
            "reduce threads or parallel.nodes, or add machines to the cluster"
        )
    logger.info("node 0 at %s: the other machines join there", split_address(parallel.address)[0])
    return group


def resources(config: Config) -> dict[str, float]:
    """Return the Ray resources of a machine's ranks: cores, and a GPU each where they have one."""
    threads, ranks = config.threads, config.parallel.ranks_per_node
    assert isinstance(threads, int), "a resolved configuration has no auto"
    cores: dict[str, float] = {"CPU": threads * ranks}
    return cores | ({"GPU": ranks} if config.device in GPUS else {})


def _listed(amounts: Mapping[str, float]) -> str:
    names = {"CPU": "cores", "GPU": "GPUs"}
    return " and ".join(f"{count:g} {names[name]}" for name, count in amounts.items())


def _start(cluster: _Cluster, group: Any, given: Config, resolved: Config) -> list[Any]:
    """Start an actor for each of the other machines."""
    tree = node_settings(given, resolved)
    keeper = cluster.ray.remote(NodeKeeper)
    actors: list[Any] = []
    for node in range(1, resolved.parallel.nodes):
        place = cluster.strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=node
        )
        actor = keeper.options(
            num_cpus=0,
            num_gpus=resources(resolved).get("GPU", 0),  # Ray hides all others
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=place,
        ).remote()
        actor.run.remote(tree, node)
        actors.append(actor)
    return actors
