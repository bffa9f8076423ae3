from __future__ import annotations

import pytest

from sylvan.config.chaos import Faults, read_faults
from sylvan.config.chaos_rules import CHAOS_RULES
from sylvan.config.load import Setting, load
from sylvan.protocol.errors import ConfigError


def test_faults_are_read_with_their_units():
    given = {"kill-scheduler": "0.01", "ipc_delay": "50ms", "clock-jump": "1h", "stop": "2"}

    assert read_faults(given) == Faults(
        kill_scheduler=0.01, ipc_delay_s=0.05, clock_jump_s=3600.0, stop_s=2.0
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"kill-schedule": "0.1"},
            r"unknown fault 'kill-schedule' \(did you mean kill-scheduler\?\)",
        ),
        ({"kill-scheduler": "2"}, "kill-scheduler: expected a number from 0 to 1"),
        ({"disk-full": "nan"}, "disk-full: expected a number"),
        ({"ipc-delay": "-1ms"}, "ipc-delay: expected a time"),
        ({"ipc-delay": "soon"}, "such as 50ms"),
    ],
)
def test_what_is_no_fault_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        read_faults(given)


class Case:
    def __init__(self, config):
        self.config = config


@pytest.mark.parametrize(
    ("flags", "broken"),
    [
        ({}, []),
        ({"chaos": "disk-full=0.1"}, []),
        ({"chaos": "disk-full=0.1", "server.host": "::1"}, []),
        ({"chaos": "disk-full=0.1", "server.host": "0.0.0.0"}, ["chaos for strangers"]),
        ({"chaos": "disk-full=0.1", "server.host": "example.com"}, ["chaos for strangers"]),
        ({"chaos": "disk-full=0.1", "processes": "one"}, []),
        ({"chaos": "ipc-delay=1s", "processes": "one"}, ["chaos without processes"]),
        ({"chaos": "sun=1"}, ["unknown faults"]),
    ],
)
def test_servers_that_others_reach_do_not_harm_themselves(flags, broken):
    case = Case(load([Setting(*item, "flag", "--") for item in flags.items()]).config)

    assert [rule.name for rule in CHAOS_RULES if rule.broken(case)] == broken
