"""Impossible combinations of settings, in one table; each message says what to do instead."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sylvan.checkpoints.formats import PICKLED
from sylvan.config.chaos_rules import CHAOS_RULES
from sylvan.config.facts import KEEPS_CODES, Facts
from sylvan.config.fields import get, nearest, size_text
from sylvan.config.jax_rules import JAX_RULES, KEYS_ON_JAX
from sylvan.config.parallel_rules import PARALLEL_RULES
from sylvan.config.parse import PLUG_INS
from sylvan.config.quantization import ROUNDED_ROWS, STORED
from sylvan.config.resolve import CACHE_POLICIES, Resolved
from sylvan.config.rules import Rule, RuleCase
from sylvan.config.sglang_values import alternative_to
from sylvan.config.speculative_rules import SPECULATIVE_RULES
from sylvan.config.tree import DRAFT_HEADS, OWN_HEAD
from sylvan.config.values import no_network, not_an_address
from sylvan.protocol.errors import ConfigError

_NO_DEVICE = (
    "this machine has no such device, or the installed torch cannot use it; choose device=cpu or "
    "auto"
)


def check(resolved: Resolved, facts: Facts) -> None:
    """Report all violated rules at once.

    Raises:
        ConfigError: at least one rule is violated; one line for each.
    """
    case = RuleCase(resolved, facts)
    broken = [rule for rule in RULES if rule.broken(case)]
    if broken:
        raise ConfigError("\n".join(explain(rule, case) for rule in broken))


def explain(rule: Rule, case: RuleCase) -> str:
    """The message of a rule, with the values of the fields that it mentions."""
    text = rule.message if isinstance(rule.message, str) else rule.message(case)

    def shown(match: re.Match[str]) -> str:
        path = match[1]
        return f"{path}={_value_text(get(case.config, path))}"

    return re.sub(r"\{([a-z0-9_.]+)\}", shown, text)


def _value_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unknown_options(case: RuleCase) -> Sequence[str]:
    lines: list[str] = []
    for path in PLUG_INS:
        known = case.facts.options.get(path)
        value = str(get(case.config, path))
        if known is not None and value not in (*known, "auto", "none"):
            if way := alternative_to(path, value):
                lines.append(f"{path}={value} is not supported: {way}")
                continue
            hint = nearest(value, known) or f"; there is {', '.join(known) or 'none yet'}"
            lines.append(f"{path}: unknown {value!r}{hint}")
    return lines


def _foreign_device(case: RuleCase) -> bool:
    """Whether another message names the device and the way out."""
    known, name = case.facts.options.get("device"), case.config.device
    return known is not None and name not in known and bool(alternative_to("device", name))


def _memory_message(case: RuleCase) -> str:
    plan, missing = case.resolved.plan, case.missing_bytes
    return (
        f"too little memory: {plan.describe()}; {size_text(missing)} missing. Free memory, or "
        "lower cache.memory, context_len, scheduler.max_batch_tokens or "
        "scheduler.max_running_reqs, or choose a smaller model"
    )


def _whole_prompts_too_long(case: RuleCase) -> bool:
    scheduler, longest = case.config.scheduler, case.config.context_len
    most = scheduler.max_batch_tokens
    return (
        (scheduler.chunk_tokens == 0 or not case.facts.model.causal)
        and isinstance(longest, int)
        and isinstance(most, int)
        and most < longest
    )


def _chunk_over_step(case: RuleCase) -> bool:
    scheduler = case.config.scheduler
    chunk, most = scheduler.chunk_tokens, scheduler.max_batch_tokens
    given = all(case.given(f"scheduler.{name}") for name in ("chunk_tokens", "max_batch_tokens"))
    return given and isinstance(chunk, int) and isinstance(most, int) and chunk > most


def _tokens_over_memory(case: RuleCase) -> bool:
    memory, tokens = case.config.cache.memory, case.config.cache.max_tokens
    plan = case.resolved.plan
    if not (isinstance(memory, int) and isinstance(tokens, int)):
        return False
    last = (tokens - 1) // plan.page_size * plan.page_size  # start of the last page
    return plan.bytes_of(last) >= memory


_ALONE = ("server.root_path", "server.allowed_hosts", "server.register", "server.grpc_port")
"""Server settings that the gateway in front of replicas does not support."""


def _not_behind_gateway(case: RuleCase) -> Sequence[str]:
    return [path for path in _ALONE if get(case.config, path) not in (None, "", ())]


def _pinned(case: RuleCase) -> str:
    """Return the error of the pinned adapters; empty: none."""
    lora = case.config.lora
    if lora is None:
        return ""
    unknown = [name for name in lora.pinned if name not in lora.adapters]
    if unknown:
        return f"{unknown[0]} is not one of lora.adapters"
    if len(lora.pinned) >= max(2, lora.max_per_batch):
        return f"others would have no slot; lora.max_per_batch is {lora.max_per_batch}"
    return ""


def _not_with_a_role(case: RuleCase) -> Sequence[str]:
    """Why this server cannot have a prefill or decode role."""
    config = case.config
    if config.disagg is None:
        return ()
    reasons = {
        "tiers": (
            config.disagg.transfer == "store" and config.tiers is None,
            "disagg.transfer=store transfers KV through a store: set tiers.storage",
        ),
        "{server.replicas}": (
            config.server.replicas > 1 and config.disagg.role is not None,
            "start them with --pd P:D instead",
        ),
        "{device}": (config.device != "cpu", "KV can be transferred between CPUs only, so far"),
        "{task}": (config.task not in ("generate", "auto"), "only generation has two phases"),
        "{cache.prefix}": (config.cache.prefix == "none", "choose cache.prefix=radix"),
        "{observe.record}": (
            config.observe.record is not None,
            "KV that another server sends cannot be replayed",
        ),
    }
    return [
        why if path == "tiers" else f"disagg and {path} exclude each other: {why}"
        for path, (broken, why) in reasons.items()
        if broken
    ]


def _not_between_steps(case: RuleCase) -> Sequence[str]:
    """Why prompts cannot be computed between steps."""
    config = case.config
    if config.pdmux is None:
        return ()
    heads = config.speculative is not None and config.speculative.algorithm in (
        *DRAFT_HEADS,
        OWN_HEAD,
    )
    reasons = {
        "{parallel.tp}": (config.parallel.tp > 1, "prompts are computed op by op by one rank only"),
        "{device}": (config.device != "cpu", "only the CPU can run a prompt op by op, so far"),
        "{task}": (config.task not in ("generate", "auto"), "nothing decodes"),
        "lora": (config.lora is not None, "prompts between steps cannot use adapters"),
        "{speculative.algorithm}": (heads, "draft heads run with whole steps only"),
        "{observe.record}": (config.observe.record is not None, "it could not be replayed"),
    }
    return [
        f"pdmux and {path} exclude each other: {why}"
        for path, (broken, why) in reasons.items()
        if broken
    ]


def _context_over_cache(case: RuleCase) -> bool:
    longest, plan = case.config.context_len, case.resolved.plan
    most = plan.num_tokens // case.config.parallel.attention_groups
    return isinstance(longest, int) and longest > most and not case.missing_bytes


RULES = (
    Rule(
        "fewer adapters in memory than in a batch",
        ("lora.max_loaded", "lora.max_per_batch"),
        lambda c: (
            c.config.lora is not None
            and c.config.lora.max_loaded is not None
            and c.config.lora.max_loaded < c.config.lora.max_per_batch
        ),
        "{lora.max_loaded}: fewer than {lora.max_per_batch}, which are in memory at the same time",
    ),
    Rule(
        "pinned adapters",
        ("lora.pinned", "lora.max_per_batch"),
        lambda c: bool(_pinned(c)),
        lambda c: f"{{lora.pinned}}: {_pinned(c)}",
    ),
    Rule(
        "replicas with settings that the gateway lacks",
        ("server.replicas", *_ALONE),
        lambda c: c.config.server.replicas > 1 and bool(_not_behind_gateway(c)),
        lambda c: "\n".join(
            f"{path}: not with {{server.replicas}}: start the servers one by one, and sylvan route"
            for path in _not_behind_gateway(c)
        ),
    ),
    Rule(
        "no role",
        ("disagg.role",),
        lambda c: (
            c.config.disagg is not None
            and c.config.disagg.role is None
            and c.config.server.replicas == 1
        ),
        "disagg.role is missing: give --disaggregation-mode, or start all servers with --pd P:D",
    ),
    Rule(
        "roles with others",
        ("disagg", "tiers", "server.replicas", "device", "task", "cache.prefix"),
        lambda c: bool(_not_with_a_role(c)),
        lambda c: "\n".join(_not_with_a_role(c)),
    ),
    Rule(
        "pdmux with settings that it excludes",
        ("pdmux", "parallel.tp", "device", "task", "lora"),
        lambda c: bool(_not_between_steps(c)),
        lambda c: "\n".join(_not_between_steps(c)),
    ),
    Rule(
        "proxies without address",
        ("server.trusted_proxies",),
        lambda c: no_network(c.config.server.trusted_proxies) is not None,
        lambda c: not_an_address(c.config.server.trusted_proxies),
    ),
    Rule(
        "registration of a server without an address",
        ("server.register", "server.uds", "server.register_url"),
        lambda c: (
            bool(c.config.server.register)
            and c.config.server.register_url is None
            and c.config.server.uds is not None
        ),
        "{server.register}: gateways cannot reach {server.uds}; give server.register_url",
    ),
    Rule(
        "registered as everywhere",
        ("server.register", "server.host", "server.register_url"),
        lambda c: (
            bool(c.config.server.register)
            and c.config.server.register_url is None
            and c.config.server.host in ("0.0.0.0", "::")
        ),
        "{server.register}: {server.host} is not an address that gateways can reach; give "
        "server.register_url",
    ),
    Rule(
        "unknown option",
        PLUG_INS,
        lambda c: bool(_unknown_options(c)),
        lambda c: "\n".join(_unknown_options(c)),
    ),
    Rule(
        "tiers without prefixes",
        ("tiers", "cache.prefix"),
        lambda c: c.config.tiers is not None and c.config.cache.prefix == "none",
        "tiers keep cached prefixes, but {cache.prefix}; leave tiers out, or choose "
        "cache.prefix=radix",
    ),
    Rule(
        "two sizes given for the host tier",
        ("tiers.host_ratio", "tiers.host_bytes"),
        lambda c: (
            c.config.tiers is not None
            and c.config.tiers.host_ratio is not None
            and c.config.tiers.host_bytes is not None
        ),
        "{tiers.host_ratio} and {tiers.host_bytes} both size the host tier; give one of them",
    ),
    Rule(
        "data type of a host tier that is off",
        ("tiers.host_dtype", "tiers.host_ratio"),
        lambda c: (
            c.config.tiers is not None
            and c.config.tiers.host_dtype != "same"
            and c.config.tiers.host_ratio is None
            and c.config.tiers.host_bytes is None
        ),
        "{tiers.host_dtype}: there is no host tier; give tiers.host_ratio or tiers.host_bytes",
    ),
    Rule(
        "8-bit host tier below an 8-bit cache",
        ("tiers.host_dtype", "cache.dtype"),
        lambda c: (
            c.config.tiers is not None
            and c.config.tiers.host_dtype == "int8"
            and c.config.cache.dtype != "model"
        ),
        "{tiers.host_dtype}: keys and values have 8 bits already, {cache.dtype}; leave "
        "tiers.host_dtype at same",
    ),
    Rule(
        "tiers of vectors",
        ("tiers", "task"),
        lambda c: c.config.tiers is not None and not c.facts.model.causal,
        "tiers keep cached prefixes, and this model has none: its tokens see those after them; "
        "leave tiers out",
    ),
    Rule(
        "tiers recorded",
        ("tiers", "observe.record"),
        lambda c: c.config.tiers is not None and c.config.observe.record is not None,
        "{observe.record}: KV that a store returns cannot be replayed; leave tiers or "
        "observe.record out",
    ),
    Rule(
        "task that the model does not support",
        ("task",),
        lambda c: c.config.task not in c.facts.model.tasks,
        lambda c: (
            f"{{task}}: this model can be served for {' or '.join(c.facts.model.tasks)} only; "
            "leave task at auto"
        ),
    ),
    Rule(
        "pickled weights",
        ("load_format",),
        lambda c: c.facts.model.weights == "pt" and c.config.load_format == "auto",
        lambda c: f"model: {c.facts.model.name!r} {PICKLED}",
    ),
    Rule(
        "load cache of random weights",
        ("load_cache", "load_format"),
        lambda c: c.config.load_cache is not None and c.config.load_format == "dummy",
        "{load_cache} caches packed weights, and {load_format} has random ones; leave load_cache "
        "out",
    ),
    Rule(
        "load cache on a GPU",
        ("load_cache", "device"),
        lambda c: c.config.load_cache is not None and c.config.device not in ("cpu", "auto"),
        "{load_cache} caches weights that are packed for CPUs, not for {device}; leave "
        "load_cache out",
    ),
    Rule(
        "no such device",
        ("device",),
        lambda c: c.device is None and not _foreign_device(c),
        lambda c: "{device}: " + c.facts.absent.get(c.config.device, _NO_DEVICE),
    ),
    Rule(
        "dtype not on this device",
        ("dtype", "device"),
        lambda c: (
            c.device is not None
            and c.device.kind != "cpu"
            and c.config.dtype not in c.device.fast_dtypes
        ),
        lambda c: (
            "{device} cannot compute with {dtype}; choose "
            f"{' or '.join(sorted(c.device.fast_dtypes)) if c.device else ''}"
        ),
    ),
    Rule(
        "attention not installed",
        ("attention",),
        lambda c: c.config.attention in c.facts.not_installed,
        lambda c: (
            f"{{attention}} is not installed: {c.facts.not_installed[c.config.attention]}, or "
            "leave attention at auto"
        ),
    ),
    Rule(
        "attention not with this dtype",
        ("attention", "dtype"),
        lambda c: (
            c.attention is not None
            and c.attention.dtypes is not None
            and c.config.dtype not in c.attention.dtypes
        ),
        lambda c: (
            "{attention} cannot compute with {dtype}, only with "
            f"{' or '.join(sorted((c.attention and c.attention.dtypes) or ()))}; "
            "leave attention at auto"
        ),
    ),
    Rule(
        "attention not with this head size",
        ("attention",),
        lambda c: (
            c.attention is not None
            and c.attention.max_head_dim is not None
            and c.facts.model.head_dim > c.attention.max_head_dim
        ),
        lambda c: (
            f"{{attention}} has no kernel for heads of {c.facts.model.head_dim}, at most of "
            f"{c.attention.max_head_dim if c.attention else 0}; leave attention at auto"
        ),
    ),
    Rule(
        "attention not with this cache dtype",
        ("attention", "cache.dtype"),
        lambda c: c.attention is not None and c.config.cache.dtype not in c.attention.kv_dtypes,
        "{attention} cannot read a KV cache of {cache.dtype}; leave one of them at auto",
    ),
    Rule(
        "runner not on this device",
        ("runner", "device"),
        lambda c: c.device is not None and c.config.runner not in ("auto", *c.device.runners),
        "{runner} does not work with {device} here; leave runner at auto",
    ),
    Rule(
        "no attention fits",
        ("attention", "device", "runner", "cache.page_size", "cache.dtype"),
        lambda c: (
            c.device is not None
            and c.config.attention == "auto"
            and c.config.runner in ("auto", *c.device.runners)
            and not KEYS_ON_JAX.broken(c)
        ),
        "no attention backend fits {device}, {runner}, {cache.page_size} and {cache.dtype}; leave "
        "one of them at auto, or cache.dtype at model",
    ),
    Rule(
        "attention not on this device",
        ("attention", "device"),
        lambda c: c.attention is not None and c.config.device not in c.attention.devices,
        "{attention} does not run on {device}; leave attention at auto",
    ),
    Rule(
        "attention not with this runner",
        ("attention", "runner"),
        lambda c: (
            c.device is not None
            and c.attention is not None
            and c.config.runner not in ("auto", *c.attention.runners)
        ),
        "{attention} is not part of {runner}; leave one of them at auto",
    ),
    Rule(
        "attention not with this page size",
        ("attention", "cache.page_size"),
        lambda c: (
            c.attention is not None
            and c.attention.page_sizes is not None
            and c.config.cache.page_size not in c.attention.page_sizes
        ),
        "{attention} cannot use {cache.page_size}; leave cache.page_size at auto",
    ),
    Rule(
        "cannot be deterministic",
        (
            *("deterministic", "attention", "runner", "device", "cache.page_size", "cache.dtype"),
            "tiers.host_dtype",
        ),
        lambda c: c.config.deterministic is True and c.determinism_blocker is not None,
        lambda c: (
            f"{{deterministic}} cannot be kept: {blocker.cause}; {blocker.way}"
            if (blocker := c.determinism_blocker)
            else ""
        ),
    ),
    Rule(
        "deterministic with a PyTorch fallback",
        ("deterministic", "runner_fallback"),
        lambda c: all(c.given(name) is True for name in ("deterministic", "runner_fallback")),
        "{deterministic} cannot be kept if the model falls back to PyTorch, which "
        "{runner_fallback} allows; leave one of them at auto",
    ),
    Rule(
        "no such quantisation",
        ("quantization",),
        lambda c: (
            c.config.quantization is not None
            and c.config.quantization not in STORED
            and (
                c.config.quantization not in c.facts.quantizations
                or c.config.device not in KEEPS_CODES
            )
        ),
        "{quantization}: {device} has no kernels for quantised matrices; leave it at none",
    ),
    Rule(
        "quantised activations on a GPU",
        ("quantization", "device"),
        lambda c: c.config.quantization in ROUNDED_ROWS and c.config.device != "cpu",
        "{quantization} quantises activations to 8 bits, on CPUs only; choose w4a16 or fp8, or "
        "device=cpu",
    ),
    Rule(
        "FP8 activations not on this device",
        ("fp8_activations", "device"),
        lambda c: c.config.fp8_activations and c.config.device not in ("cuda", "rocm"),
        "{fp8_activations}, but {device} does not multiply 8-bit floats; leave it at false",
    ),
    Rule(
        "context too long",
        ("context_len",),
        lambda c: (
            isinstance(c.config.context_len, int)
            and c.config.context_len > c.facts.model.context_len
        ),
        lambda c: (
            f"{{context_len}} is more than {c.facts.model.name} supports, "
            f"{c.facts.model.context_len}; leave context_len at auto"
        ),
    ),
    Rule(
        "policy without cache",
        ("scheduler.policy", "cache.prefix"),
        lambda c: c.config.cache.prefix == "none" and c.config.scheduler.policy in CACHE_POLICIES,
        "{scheduler.policy} orders by cached prefixes, but {cache.prefix}; choose "
        "scheduler.policy=fcfs, or cache.prefix=radix",
    ),
    Rule(
        "events without cache",
        ("kv_events", "cache.prefix"),
        lambda c: c.config.cache.prefix == "none" and c.config.kv_events is not None,
        "kv_events publishes what is cached, but {cache.prefix}; leave kv_events out, or choose "
        "cache.prefix=radix",
    ),
    Rule(
        "no recurrent state slot for a request",
        ("cache.max_states",),
        lambda c: c.facts.model.state_numbers > 0 and c.config.cache.max_states == 1,
        "{cache.max_states} leaves no slot for a request: this model has recurrent layers, and one "
        "slot is the empty state; use at least 2",
    ),
    Rule(
        "prompts do not fit into a step",
        ("scheduler.chunk_tokens", "scheduler.max_batch_tokens", "context_len"),
        _whole_prompts_too_long,
        "{scheduler.chunk_tokens} never splits a prompt, so {scheduler.max_batch_tokens} must be "
        "at least {context_len}; leave scheduler.max_batch_tokens at auto",
    ),
    Rule(
        "chunk larger than a step",
        ("scheduler.chunk_tokens", "scheduler.max_batch_tokens"),
        _chunk_over_step,
        "{scheduler.chunk_tokens} is more than {scheduler.max_batch_tokens}; leave one of them at "
        "auto",
    ),
    Rule(
        "tokens do not fit into the cache",
        ("cache.max_tokens", "cache.memory"),
        _tokens_over_memory,
        "{cache.max_tokens} do not fit into {cache.memory} bytes; give only one of them",
    ),
    Rule(
        "memory",
        ("cache.memory", "context_len", "scheduler.max_batch_tokens", "scheduler.max_running_reqs"),
        lambda c: c.device is not None and c.missing_bytes > 0,
        _memory_message,
    ),
    Rule(
        "context does not fit into the cache",
        ("context_len", "cache.memory", "cache.max_tokens"),
        _context_over_cache,
        lambda c: (
            f"{{context_len}} does not fit into a KV cache of {c.resolved.plan.num_tokens} tokens; "
            "lower it, or raise cache.memory (or cache.max_tokens)"
        ),
    ),
    *PARALLEL_RULES,
    *SPECULATIVE_RULES,
    *JAX_RULES,
    *CHAOS_RULES,
    Rule(
        "TLS key without certificate",
        ("server.ssl_keyfile", "server.ssl_certfile"),
        lambda c: c.config.server.ssl_keyfile is not None and not c.config.server.ssl_certfile,
        "{server.ssl_keyfile} also needs server.ssl_certfile",
    ),
    Rule(
        "client certificates without TLS",
        ("server.ssl_ca_certs", "server.ssl_certfile"),
        lambda c: c.config.server.ssl_ca_certs is not None and not c.config.server.ssl_certfile,
        "{server.ssl_ca_certs} also needs server.ssl_certfile",
    ),
)
