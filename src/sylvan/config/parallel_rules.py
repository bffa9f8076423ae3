"""Impossible combinations with several ranks."""

from __future__ import annotations

from sylvan.config.address import split_address
from sylvan.config.determinism import same_bits_blockers
from sylvan.config.facts import ON_JAX
from sylvan.config.parallel import GPUS
from sylvan.config.rules import Rule, RuleCase
from sylvan.config.tree import DRAFT_HEADS, OWN_HEAD


def _on_gpus(case: RuleCase) -> list[str]:
    """Name the settings that ranks with a GPU each do not work with."""
    config = case.config
    if config.parallel.ranks == 1 or config.device not in GPUS:
        return []
    broken = {
        "{parallel.attention_dp}": config.parallel.attention_groups > 1,
        "{parallel.expert_exchange}": config.parallel.expert_exchange == "all_to_all",
        "{parallel.backend}": config.parallel.backend == "gloo",
        "tiers": config.tiers is not None,
        "disagg": config.disagg is not None,
        "pdmux": config.pdmux is not None,
    }
    return [
        f"{{device}}: ranks with a GPU each do not work with {what}; leave it out"
        for what, is_broken in broken.items()
        if is_broken
    ]


def _without_same_bits(case: RuleCase) -> list[str]:
    """Why results cannot be bit-identical for any number of ranks."""
    if case.config.parallel.same_bits is not True:
        return []
    return [
        f"parallel.same_bits and {what} exclude each other: {why}"
        for what, why in same_bits_blockers(case.config, case.facts).items()
    ]


def _without_stages(case: RuleCase) -> list[str]:
    """Reject settings that pipeline stages do not support."""
    config = case.config
    if config.parallel.pp == 1:
        return []
    given = config.speculative
    heads = given is not None and given.algorithm in (*DRAFT_HEADS, OWN_HEAD)
    broken = {
        "tiers": config.tiers is not None,
        "disagg": config.disagg is not None,
        "pdmux": config.pdmux is not None,
        "{speculative.algorithm} (draft heads read layers of several stages)": heads,
    }
    return [
        f"{{parallel.pp}}: pipeline stages do not work with {what}; use parallel.pp=1"
        for what, is_broken in broken.items()
        if is_broken
    ]


def _without_groups(case: RuleCase) -> list[str]:
    """Reject settings that groups with different requests do not support."""
    config = case.config
    if config.parallel.attention_groups == 1:
        return []
    given = config.speculative
    heads = given is not None and given.algorithm in (*DRAFT_HEADS, OWN_HEAD)
    broken = {
        "{parallel.pp}": config.parallel.pp > 1,
        "{parallel.same_bits}": config.parallel.same_bits is True,
        "tiers": config.tiers is not None,
        "disagg": config.disagg is not None,
        "{speculative.algorithm}": heads,
        "pdmux": config.pdmux is not None,
        "kv_events": config.kv_events is not None,
        "{observe.record}": config.observe.record is not None,
    }
    return [
        f"{{parallel.attention_dp}}: groups with different requests do not work with {what}; "
        "use parallel.attention_dp=1"
        for what, is_broken in broken.items()
        if is_broken
    ]


def _without_deepep(case: RuleCase) -> list[str]:
    """Why DeepEP cannot dispatch rows; each with the way out."""
    config, parallel = case.config, case.config.parallel
    if parallel.expert_exchange != "deepep":
        return []
    reasons = {
        "it moves rows between NVIDIA GPUs, not {device}; use parallel.expert_exchange=all_to_all "
        "on CPUs, or leave it out": config.device != "cuda",
        "it has kernels for 2, 4 and 8 GPUs, not for {parallel.tp}; use one of these numbers, or "
        "leave it out": parallel.tp not in (1, 2, 4, 8),
        "only GPUs of one machine are connected by it here, not {parallel.nodes}; leave it out": (
            parallel.nodes > 1
        ),
        "adapters lie beside the experts of rows that all ranks have; leave out lora, or it": (
            config.lora is not None
        ),
    }
    found = [why for why, is_so in reasons.items() if is_so]
    return [f"{{parallel.expert_exchange}}: {why}" for why in found]


def _fixed_experts(case: RuleCase) -> str:
    """Why experts stay where they are; empty if they can move."""
    config = case.config
    if config.parallel.ep == 1:
        return "with {parallel.ep} ranks share all experts"
    if config.lora is not None:
        return "with adapters (lora) experts stay where they are"
    return "{load_format} leaves no file to read experts from" * (config.load_format == "dummy")


def _address_fault(case: RuleCase) -> str:
    """Return the error of the address of machine 0; empty: none."""
    address = case.config.parallel.address
    if address is None and case.config.parallel.placement == "ray":
        return ""  # chosen when the cluster is known
    if address is None:
        return "parallel.address is missing; give --dist-init-addr, HOST:PORT of machine 0"
    try:
        split_address(address)
    except ValueError as error:
        return f"parallel.address (--dist-init-addr): {error}, of machine 0"
    return ""


PARALLEL_RULES = (
    Rule(
        "ranks in one process",
        ("parallel.tp", "parallel.pp", "processes"),
        lambda c: c.config.parallel.ranks > 1 and c.config.processes == "one",
        "{parallel.tp} ranks in {parallel.pp} stages are separate processes, but {processes}; "
        "leave processes out",
    ),
    Rule(
        "tensor-parallel ranks not on this device",
        ("parallel.tp", "device"),
        lambda c: c.config.parallel.tp > 1 and c.config.device not in ("cpu", *GPUS),
        "{parallel.tp}: ranks share a model on CPUs and on GPUs of NVIDIA and AMD, not on "
        "{device}; use parallel.tp=1 (with parallel.devices on JAX), or device=cpu",
    ),
    Rule(
        "ranks on GPUs",
        (
            *("device", "parallel.tp", "parallel.attention_dp", "parallel.expert_exchange"),
            *("parallel.backend", "tiers", "disagg", "pdmux"),
        ),
        lambda c: bool(_on_gpus(c)),
        lambda c: "\n".join(_on_gpus(c)),
    ),
    Rule(
        "ranks without GPUs",
        ("parallel.backend", "device"),
        lambda c: c.config.parallel.backend == "nccl" and c.config.device not in GPUS,
        "{parallel.backend}: NCCL connects GPUs, not {device}; leave it at auto (and out "
        "--disable-custom-all-reduce)",
    ),
    Rule(
        "several machines without parallel.address",
        ("parallel.nodes", "parallel.address"),
        lambda c: c.config.parallel.nodes > 1 and bool(_address_fault(c)),
        lambda c: f"{{parallel.nodes}}: {_address_fault(c)}",
    ),
    Rule(
        "ranks by machines",
        ("parallel.tp", "parallel.pp", "parallel.nodes"),
        lambda c: c.config.parallel.ranks % c.config.parallel.nodes != 0,
        "{parallel.tp} ranks in {parallel.pp} stages do not divide among {parallel.nodes} "
        "machines; give a multiple",
    ),
    Rule(
        "pipeline stages not on this device",
        ("parallel.pp", "device"),
        lambda c: c.config.parallel.pp > 1 and c.config.device != "cpu",
        "{parallel.pp}: pipeline stages run on the CPU only so far, not on {device}; use "
        "parallel.pp=1, or device=cpu",
    ),
    Rule(
        "more stages than layers",
        ("parallel.pp",),
        lambda c: 0 < c.facts.model.num_layers < c.config.parallel.pp,
        lambda c: (
            f"{{parallel.pp}}: this model has {c.facts.model.num_layers} layers; use at most as "
            "many stages"
        ),
    ),
    Rule(
        "stages with others",
        ("parallel.pp", "tiers", "disagg", "speculative.algorithm", "pdmux"),
        lambda c: bool(_without_stages(c)),
        lambda c: "\n".join(_without_stages(c)),
    ),
    Rule(
        "groups of attention",
        ("parallel.attention_dp", "parallel.tp"),
        lambda c: (
            c.config.device not in ON_JAX
            and c.config.parallel.tp % c.config.parallel.attention_groups != 0
        ),
        "{parallel.attention_dp}: {parallel.tp} ranks do not divide into that many groups; choose "
        "a parallel.attention_dp that divides parallel.tp",
    ),
    Rule(
        "attention groups and replicas",
        ("parallel.attention_dp", "server.replicas"),
        lambda c: c.config.parallel.attention_groups > 1 and c.config.server.replicas > 1,
        "{parallel.attention_dp}: the ranks of one server divide the requests, and "
        "{server.replicas} would start so many servers of {parallel.tp}; leave --dp out, or use "
        "parallel.attention_dp=1",
    ),
    Rule(
        "attention groups with settings that they exclude",
        (
            *("parallel.attention_dp", "parallel.pp", "parallel.same_bits", "tiers", "disagg"),
            *("speculative.algorithm", "pdmux", "kv_events", "observe.record"),
        ),
        lambda c: bool(_without_groups(c)),
        lambda c: "\n".join(_without_groups(c)),
    ),
    Rule(
        "node rank out of range",
        ("parallel.node_rank", "parallel.nodes"),
        lambda c: c.config.parallel.node_rank >= c.config.parallel.nodes,
        "{parallel.node_rank}: {parallel.nodes} machines are numbered from 0",
    ),
    Rule(
        "placement of a single machine",
        ("parallel.placement", "parallel.nodes"),
        lambda c: c.config.parallel.placement == "ray" and c.config.parallel.nodes == 1,
        "{parallel.placement}: {parallel.nodes} machine is this one, and there is nothing to "
        "place; give --nnodes, the number of machines",
    ),
    Rule(
        "shared memory between machines",
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
        "disaggregation on several machines",
        ("disagg", "parallel.nodes"),
        lambda c: c.config.parallel.nodes > 1 and c.config.disagg is not None,
        "disagg: ranks on {parallel.nodes} machines transfer no KV yet; use parallel.nodes=1",
    ),
    Rule(
        "same_bits with settings that it excludes",
        (
            *("parallel.same_bits", "deterministic", "quantization", "lora", "parallel.nodes"),
            "parallel.tp",
        ),
        lambda c: bool(_without_same_bits(c)),
        lambda c: "\n".join(_without_same_bits(c)),
    ),
    Rule(
        "ranks that do not divide into expert groups",
        ("parallel.ep", "parallel.tp"),
        lambda c: c.config.parallel.tp % c.config.parallel.ep != 0,
        "{parallel.ep}: {parallel.tp} ranks do not divide into that many groups; choose a "
        "parallel.ep that divides parallel.tp",
    ),
    Rule(
        "ranks that do not divide into groups for dense blocks",
        ("parallel.moe_dense_tp", "parallel.tp"),
        lambda c: c.config.parallel.tp % (c.config.parallel.moe_dense_tp or 1) != 0,
        "{parallel.moe_dense_tp}: {parallel.tp} ranks do not divide into groups of that size; "
        "choose a parallel.moe_dense_tp that divides parallel.tp",
    ),
    Rule(
        "redundant experts without expert groups",
        ("parallel.redundant_experts", "parallel.ep"),
        lambda c: c.config.parallel.redundant_experts > 0 and c.config.parallel.ep == 1,
        "{parallel.redundant_experts}: with {parallel.ep} ranks share all experts; use a "
        "larger parallel.ep, or no copies",
    ),
    Rule(
        "expert rebalancing without expert groups",
        ("parallel.rebalance", "parallel.ep", "lora", "load_format"),
        lambda c: c.config.parallel.rebalance and bool(_fixed_experts(c)),
        lambda c: f"{{parallel.rebalance}}: {_fixed_experts(c)}; leave it out",
    ),
    Rule(
        "expert exchange of divided experts",
        ("parallel.expert_exchange", "parallel.ep", "parallel.tp"),
        lambda c: (
            c.config.parallel.expert_exchange != "all_gather"
            and not 1 < c.config.parallel.ep == c.config.parallel.tp
        ),
        "{parallel.expert_exchange}: ranks need whole experts, and {parallel.ep} with "
        "{parallel.tp} divides each among some; use a parallel.ep that equals parallel.tp",
    ),
    Rule(
        "dispatch by DeepEP",
        (
            *("parallel.expert_exchange", "device", "parallel.tp", "parallel.nodes"),
            "lora",
        ),
        lambda c: bool(_without_deepep(c)),
        lambda c: "\n".join(_without_deepep(c)),
    ),
    Rule(
        "expert placement without expert groups",
        ("parallel.expert_placement", "parallel.ep"),
        lambda c: c.config.parallel.expert_placement is not None and c.config.parallel.ep == 1,
        "{parallel.expert_placement}: with {parallel.ep} ranks share all experts; use a "
        "larger parallel.ep, or leave it out",
    ),
    Rule(
        "KV transfer of several ranks through a store",
        ("parallel.tp", "disagg.transfer"),
        lambda c: (
            c.config.parallel.tp > 1
            and c.config.disagg is not None
            and c.config.disagg.transfer == "store"
        ),
        "{disagg.transfer}: {parallel.tp} ranks transfer KV directly only so far; leave "
        "disagg.transfer at auto",
    ),
)
