"""Combinations that `chaos` excludes."""

from __future__ import annotations

from sylvan.config.chaos import read_faults
from sylvan.config.rules import Rule, RuleCase
from sylvan.protocol.errors import ConfigError
from sylvan.utils.origins import is_loopback


def _is_private(case: RuleCase) -> bool:
    server = case.config.server
    return server.uds is not None or server.host == "localhost" or is_loopback(server.host)


def _fault(case: RuleCase) -> str:
    try:
        read_faults(case.config.chaos)
    except ConfigError as error:
        return str(error)
    return ""


def _of_processes(case: RuleCase) -> tuple[str, ...]:
    return () if _fault(case) else read_faults(case.config.chaos).of_processes


CHAOS_RULES = (
    Rule("unknown faults", ("chaos",), lambda c: bool(_fault(c)), _fault),
    Rule(
        "chaos for strangers",
        ("chaos", "server.host"),
        lambda c: bool(c.config.chaos) and not _is_private(c),
        "{chaos}: faults are only injected into servers that other machines cannot reach; "
        "{server.host} is a public address",
    ),
    Rule(
        "chaos without processes",
        ("chaos", "processes"),
        lambda c: c.config.processes == "one" and bool(_of_processes(c)),
        "{chaos}: {processes} leaves no processes for these faults",
    ),
)
