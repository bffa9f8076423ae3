"""The settings of each of several servers on one machine."""

from __future__ import annotations

import socket
from dataclasses import replace

import msgspec
import pytest

import sylvan
from sylvan.cli.replicas import ReplicaKeys, ReservedPort, replica_specs
from sylvan.config.facts import DeviceFacts
from sylvan.config.resolve import resolve
from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.facts import gather_facts

KEYS = ReplicaKeys("client", "gateway")
PORTS = (7001, 7002)


def resolved(config, device="cpu"):
    facts = gather_facts(config)
    cpu = DeviceFacts(kind="cpu", cores=8, total_bytes=64 << 30, available_bytes=32 << 30)
    facts = replace(facts, devices={"cpu": cpu}).shared_by(len(PORTS))
    result = resolve(config, facts)
    if device == "cpu":
        return result
    return replace(result, config=msgspec.structs.replace(result.config, device=device))


def specs(device="cpu", **keywords):
    config = gather(from_keywords(keywords), environ={}).config
    return replica_specs(config, resolved(config, device), KEYS, PORTS)


def test_each_has_its_share_of_the_machine_and_an_address_of_its_own():
    first, second = specs()
    assert (first.url, second.url) == ("http://127.0.0.1:7001", "http://127.0.0.1:7002")
    assert first.settings["threads"] == second.settings["threads"] == 4
    assert first.settings["cache"]["memory"] == second.settings["cache"]["memory"] > 0
    assert first.settings["server"]["api_key"] == "client"
    assert first.settings["server"]["gateway_key"] == "gateway"


def test_what_was_given_stays():
    first, _ = specs(
        threads=3, cache__memory="1GiB", served_model_name="m", server={"api_key": "x"}
    )
    assert first.settings["threads"] == 3
    assert first.settings["cache"]["memory"] == 1 << 30
    assert first.settings["served_model_name"] == "m"
    assert first.settings["server"]["api_key"] == "client"


def test_files_and_ports_are_apart():
    first, second = specs(
        observe={"record": "/r"},
        server={"data_dir": "/d"},
        kv_events={"replay_endpoint": "tcp://127.0.0.1:6000"},
    )
    assert first.settings["observe"]["record"] == "/r/replica-0"
    assert second.settings["server"]["data_dir"] == "/d/replica-1"
    assert first.settings["kv_events"]["endpoint"] == "tcp://127.0.0.1:5557"
    assert second.settings["kv_events"]["endpoint"] == "tcp://127.0.0.1:5558"
    assert second.settings["kv_events"]["replay_endpoint"] == "tcp://127.0.0.1:6001"


def test_publishers_without_ports_are_refused():
    with pytest.raises(ConfigError, match=r"kv_events.endpoint: 'ipc:///x' needs a port"):
        specs(kv_events={"endpoint": "ipc:///x"})


def test_sections_that_are_on_stay_on():
    assert "kv_events" in specs(kv_events={})[0].settings


def test_each_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,6")
    first, second = specs("cuda")
    assert first.environment == {"CUDA_VISIBLE_DEVICES": "2"}
    assert second.environment == {"CUDA_VISIBLE_DEVICES": "5"}


def test_gpus_are_not_shared(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"server.replicas=2: .*CUDA_VISIBLE_DEVICES"):
        specs("cuda")


def test_a_reserved_port_can_be_listened_on_by_those_who_share_it_only():
    port = ReservedPort()
    try:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port.number)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port.number)).close()
        with socket.create_server(("127.0.0.1", port.number), reuse_port=True):
            socket.create_connection(("127.0.0.1", port.number)).close()
    finally:
        port.close()


def test_an_engine_is_one_replica():
    with pytest.raises(ConfigError, match="dp_size: an Engine is one replica"):
        sylvan.Engine(dp_size=2)
