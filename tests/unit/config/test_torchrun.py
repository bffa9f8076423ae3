"""torchrun's environment variables become settings."""

from __future__ import annotations

import pytest

from sylvan.config.address import split_address
from sylvan.config.env import torchrun_settings
from sylvan.protocol.errors import ConfigError

TOLD = {
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_machines_are_those_of_torchrun():
    found = {setting.path: setting.value for setting in torchrun_settings(TOLD)}
    assert found == {
        "parallel.nodes": "2",
        "parallel.node_rank": "1",
        "parallel.address": "10.0.0.1:29501",
    }


def test_one_machine_or_no_torchrun_says_nothing():
    assert torchrun_settings({**TOLD, "GROUP_WORLD_SIZE": "1"}) == []
    assert torchrun_settings({"MASTER_ADDR": "10.0.0.1", "GROUP_WORLD_SIZE": "2"}) == []


def test_several_processes_a_machine_are_refused():
    with pytest.raises(ConfigError, match=r"--nproc-per-node 1, and sylvan --tp"):
        torchrun_settings({**TOLD, "LOCAL_WORLD_SIZE": "4"})


@pytest.mark.parametrize("text", ["host", "host:", ":5", "host:70000", "host:0", "a:b"])
def test_an_address_is_a_host_and_a_port(text):
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        split_address(text)


def test_addresses_are_taken_apart():
    assert split_address("node-0.serving:20000") == ("node-0.serving", 20000)
    assert split_address("[::1]:5") == ("::1", 5)
