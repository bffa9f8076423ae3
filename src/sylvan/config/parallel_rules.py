"""Impossible combinations with several ranks."""

from __future__ import annotations

from sylvan.config.address import split_address
from sylvan.config.rules import Rule, RuleCase


def _without_same_bits(case: RuleCase) -> list[str]:
    """Why results cannot be bit-identical for any number of ranks."""
    config = case.config
    if not config.parallel.same_bits:
        return []
    stored = case.facts.model.quantization
    reasons = {
        "{deterministic}": (config.deterministic is not True, "results depend on the batch then"),
        "{quantization}": (config.quantization is not None, "ranks quantise parts of rows"),
        "quantised weights": (stored is not None, "ranks quantise parts of rows"),
        "lora": (config.lora is not None, "adapter outputs are summed by rank"),
        "{parallel.nodes}": (config.parallel.nodes > 1, "steps are not native then"),
    }
    return [
        f"parallel.same_bits and {what} exclude each other: {why}"
        for what, (broken, why) in reasons.items()
        if broken
    ]


def _address_fault(case: RuleCase) -> str:
    """What is wrong with the address of machine 0; empty if nothing is."""
    address = case.config.parallel.address
    if address is None:
        return "parallel.address is missing: HOST:PORT of machine 0"
    try:
        split_address(address)
    except ValueError as error:
        return f"parallel.address: {error}"
    return ""


PARALLEL_RULES = (
    Rule(
        "ranks in one process",
        ("parallel.tp", "processes"),
        lambda c: c.config.parallel.tp > 1 and c.config.processes == "one",
        "{parallel.tp} ranks are separate processes, but {processes}; leave processes out",
    ),
    Rule(
        "ranks on this device",
        ("parallel.tp", "device"),
        lambda c: c.config.parallel.tp > 1 and c.config.device != "cpu",
        "{parallel.tp}: ranks can share a model only on the CPU so far, not on {device}; use "
        "parallel.tp=1 (with parallel.devices on JAX), or device=cpu",
    ),
    Rule(
        "machines without an address",
        ("parallel.nodes", "parallel.address"),
        lambda c: c.config.parallel.nodes > 1 and bool(_address_fault(c)),
        lambda c: f"{{parallel.nodes}}: {_address_fault(c)}",
    ),
    Rule(
        "ranks by machines",
        ("parallel.tp", "parallel.nodes"),
        lambda c: c.config.parallel.tp % c.config.parallel.nodes != 0,
        "{parallel.tp} ranks do not divide among {parallel.nodes} machines; give a multiple",
    ),
    Rule(
        "number of the machine",
        ("parallel.node_rank", "parallel.nodes"),
        lambda c: c.config.parallel.node_rank >= c.config.parallel.nodes,
        "{parallel.node_rank}: {parallel.nodes} machines are numbered from 0",
    ),
    Rule(
        "memory of several machines",
        ("parallel.backend", "parallel.nodes"),
        lambda c: c.config.parallel.nodes > 1 and c.config.parallel.backend == "shared",
        "{parallel.backend}: machines share no memory; leave it at auto with {parallel.nodes}",
    ),
    Rule(
        "replicas on several machines",
        ("server.replicas", "parallel.nodes"),
        lambda c: c.config.parallel.nodes > 1 and c.config.server.replicas > 1,
        "{server.replicas}: with {parallel.nodes} machines a server is one replica; start the "
        "servers one by one, and sylvan route",
    ),
    Rule(
        "roles on several machines",
        ("disagg", "parallel.nodes"),
        lambda c: c.config.parallel.nodes > 1 and c.config.disagg is not None,
        "disagg: ranks on {parallel.nodes} machines transfer no KV yet; use parallel.nodes=1",
    ),
    Rule(
        "the same bits with others",
        ("parallel.same_bits", "deterministic", "quantization", "lora", "parallel.nodes"),
        lambda c: bool(_without_same_bits(c)),
        lambda c: "\n".join(_without_same_bits(c)),
    ),
    Rule(
        "experts in groups of ranks",
        ("parallel.ep", "parallel.tp"),
        lambda c: c.config.parallel.tp % c.config.parallel.ep != 0,
        "{parallel.ep}: {parallel.tp} ranks do not divide into that many groups; choose a "
        "parallel.ep that divides parallel.tp",
    ),
    Rule(
        "copies of experts without groups",
        ("parallel.redundant_experts", "parallel.ep"),
        lambda c: c.config.parallel.redundant_experts > 0 and c.config.parallel.ep == 1,
        "{parallel.redundant_experts}: with {parallel.ep} every rank has all experts; use a "
        "larger parallel.ep, or no copies",
    ),
    Rule(
        "placement of experts without groups",
        ("parallel.expert_placement", "parallel.ep"),
        lambda c: c.config.parallel.expert_placement is not None and c.config.parallel.ep == 1,
        "{parallel.expert_placement}: with {parallel.ep} every rank has all experts; use a "
        "larger parallel.ep, or leave it out",
    ),
    Rule(
        "ranks with tiers",
        ("parallel.tp", "tiers"),
        lambda c: c.config.parallel.tp > 1 and c.config.tiers is not None,
        "{parallel.tp}: KV tiers support one rank only so far; use parallel.tp=1, or leave "
        "tiers out",
    ),
    Rule(
        "ranks with overlap",
        ("parallel.tp", "scheduler.overlap"),
        lambda c: c.config.parallel.tp > 1 and c.config.scheduler.overlap == "on",
        "{scheduler.overlap} has steps launched ahead, and {parallel.tp} ranks agree on each step; "
        "leave scheduler.overlap at auto",
    ),
)
