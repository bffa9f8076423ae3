from __future__ import annotations

import dataclasses

import pytest

from sylvan.config.check import RULES, check
from sylvan.config.facts import DeviceFacts
from sylvan.config.fields import fields, replaced, sections
from sylvan.config.resolve import resolve
from sylvan.config.tree import (
    Config,
    DisaggConfig,
    KVEventsConfig,
    LoraConfig,
    PdMuxConfig,
    SpeculativeConfig,
    TiersConfig,
)
from sylvan.protocol.errors import ConfigError
from tests.support.config_facts import make_facts, make_model

STANDALONE = SpeculativeConfig(algorithm="standalone", draft_model="d")
NODES = {"parallel.tp": 2, "parallel.nodes": 2, "parallel.address": "h:1"}
BROKEN = {
    "tiers without prefixes": (
        {"tiers": TiersConfig(), "cache.prefix": "none"},
        "tiers keep cached prefixes, but cache.prefix=none",
    ),
    "load cache of random weights": (
        {"load_cache": "/c", "load_format": "dummy"},
        "load_cache=/c caches packed weights, and load_format=dummy has random ones",
    ),
    "load cache on a GPU": (
        {"load_cache": "/c", "device": "cuda"},
        "load_cache=/c caches weights that are packed for CPUs, not for device=cuda",
    ),
    "FP8 activations not on this device": (
        {"fp8_activations": True},
        "fp8_activations=true, but device=cpu does not multiply 8-bit floats; leave it at false",
    ),
    "tiers of vectors": ({"tiers": TiersConfig()}, "this model has none: its tokens see"),
    "two sizes given for the host tier": (
        {"tiers": TiersConfig(host_ratio=2.0, host_bytes=4096)},
        "tiers.host_ratio=2.0 and tiers.host_bytes=4096 both size the host tier",
    ),
    "data type of a host tier that is off": (
        {"tiers": TiersConfig(host_dtype="int8")},
        "tiers.host_dtype=int8: there is no host tier; give tiers.host_ratio",
    ),
    "8-bit host tier below an 8-bit cache": (
        {"tiers": TiersConfig(host_dtype="int8", host_ratio=2.0), "cache.dtype": "int8"},
        "keys and values have 8 bits already, cache.dtype=int8",
    ),
    "tiers recorded": (
        {"tiers": TiersConfig(), "observe.record": "flight"},
        "observe.record=flight: KV that a store returns cannot be replayed",
    ),
    "no role": ({"disagg": DisaggConfig()}, "disagg.role is missing: give --disagg"),
    "roles with others": (
        {"disagg": DisaggConfig(role="prefill", transfer="store")},
        "disagg.transfer=store transfers KV through a store: set tiers.storage",
    ),
    "pdmux with settings that it excludes": (
        {"pdmux": PdMuxConfig(), "lora": LoraConfig()},
        "pdmux and lora exclude each other: prompts between steps cannot use adapters",
    ),
    "fewer adapters in memory than in a batch": (
        {"lora": LoraConfig(max_loaded=3)},
        "lora.max_loaded=3: fewer than lora.max_per_batch=8",
    ),
    "pinned adapters": (
        {"lora": LoraConfig(pinned=("a",))},
        "lora.pinned=('a',): a is not one of lora.adapters",
    ),
    "replicas with settings that the gateway lacks": (
        {"server.replicas": 2, "server.root_path": "/x"},
        "server.root_path: not with server.replicas=2: start the servers one by one",
    ),
    "ranks in one process": (
        {"parallel.tp": 2, "processes": "one"},
        "parallel.tp=2 ranks in parallel.pp=1 stages are separate processes, but processes=one",
    ),
    "pipeline stages not on this device": (
        {"parallel.pp": 2, "device": "cuda"},
        "parallel.pp=2: pipeline stages run on the CPU only so far, not on device=cuda",
    ),
    "more stages than layers": (
        {"parallel.pp": 5},
        "parallel.pp=5: this model has 4 layers; use at most as many stages",
    ),
    "stages with others": (
        {"parallel.pp": 2, "tiers": TiersConfig()},
        "parallel.pp=2: pipeline stages do not work with tiers; use",
    ),
    "tensor-parallel ranks not on this device": (
        {"parallel.tp": 2, "device": "mps"},
        "parallel.tp=2: ranks share a model on CPUs and on GPUs of NVIDIA and AMD, not on device=m",
    ),
    "ranks on GPUs": (
        {"parallel.tp": 2, "device": "cuda", "tiers": TiersConfig()},
        "device=cuda: ranks with a GPU each do not work with tiers; leave it out",
    ),
    "ranks without GPUs": (
        {"parallel.tp": 2, "parallel.backend": "nccl"},
        "parallel.backend=nccl: NCCL connects GPUs, not device=cpu; leave it at auto",
    ),
    "ranks that do not divide into groups for dense blocks": (
        {"parallel.tp": 4, "parallel.moe_dense_tp": 3},
        "parallel.moe_dense_tp=3: parallel.tp=4 ranks do not divide into groups of that size",
    ),
    "parallel.devices without JAX": (
        {"parallel.devices": 2},
        "parallel.devices=2: one process can share a model among devices only on JAX, not on "
        "device=cpu",
    ),
    "devices that do not divide into groups": (
        {"device": "jax", "parallel.devices": 4, "parallel.attention_dp": 3},
        "parallel.attention_dp=3: parallel.devices=4 on device=jax do not divide into that many",
    ),
    "8-bit KV on JAX": (
        {"device": "jax", "cache.dtype": "int8"},
        "device=jax: pages of cache.dtype=int8 have no lowering to JAX",
    ),
    "KV transfer of several ranks through a store": (
        {
            "parallel.tp": 2,
            "tiers": TiersConfig(storage="file"),
            "disagg": DisaggConfig(role="prefill", transfer="store"),
        },
        "disagg.transfer=store: parallel.tp=2 ranks transfer KV directly only so far",
    ),
    "ranks that do not divide into expert groups": (
        {"parallel.tp": 4, "parallel.ep": 3},
        "parallel.ep=3: parallel.tp=4 ranks do not divide into that many groups",
    ),
    "redundant experts without expert groups": (
        {"parallel.tp": 2, "parallel.redundant_experts": 2},
        "parallel.redundant_experts=2: with parallel.ep=1 ranks share all experts",
    ),
    "expert placement without expert groups": (
        {"parallel.tp": 2, "parallel.expert_placement": "f.json"},
        "parallel.expert_placement=f.json: with parallel.ep=1 ranks share all experts",
    ),
    "expert rebalancing without expert groups": (
        {"parallel.tp": 2, "parallel.rebalance": True},
        "parallel.rebalance=true: with parallel.ep=1 ranks share all experts",
    ),
    "expert exchange of divided experts": (
        {"parallel.tp": 2, "parallel.expert_exchange": "all_to_all"},
        "parallel.expert_exchange=all_to_all: ranks need whole experts, and parallel.ep=1 with "
        "parallel.tp=2 divides each among some",
    ),
    "dispatch by DeepEP": (
        {"parallel.tp": 2, "parallel.ep": 2, "parallel.expert_exchange": "deepep"},
        "parallel.expert_exchange=deepep: it moves rows between NVIDIA GPUs, not device=cpu; use "
        "parallel.expert_exchange=all_to_all on CPUs, or leave it out",
    ),
    "groups of attention": (
        {"parallel.tp": 4, "parallel.attention_dp": 3},
        "parallel.attention_dp=3: parallel.tp=4 ranks do not divide into that many groups",
    ),
    "attention groups and replicas": (
        {"parallel.tp": 2, "parallel.attention_dp": 2, "server.replicas": 2},
        "parallel.attention_dp=2: the ranks of one server divide the requests, and "
        "server.replicas=2 would start so many servers of parallel.tp=2",
    ),
    "attention groups with settings that they exclude": (
        {"parallel.tp": 2, "parallel.attention_dp": 2, "tiers": TiersConfig()},
        "parallel.attention_dp=2: groups with different requests do not work with tiers; use",
    ),
    "placement of a single machine": (
        {"parallel.placement": "ray"},
        "parallel.placement=ray: parallel.nodes=1 machine is this one",
    ),
    "several machines without parallel.address": (
        {"parallel.tp": 2, "parallel.nodes": 2},
        "parallel.nodes=2: parallel.address is missing; give --dist-init-addr, HOST:PORT of",
    ),
    "ranks by machines": (
        {"parallel.tp": 3, "parallel.nodes": 2, "parallel.address": "h:1"},
        "parallel.tp=3 ranks in parallel.pp=1 stages do not divide among parallel.nodes=2 machines",
    ),
    "node rank out of range": (
        {"parallel.node_rank": 1},
        "parallel.node_rank=1: parallel.nodes=1 machines are numbered from 0",
    ),
    "shared memory between machines": (
        {**NODES, "parallel.backend": "shared"},
        "parallel.backend=shared: machines share no memory",
    ),
    "replicas on several machines": (
        {**NODES, "server.replicas": 2},
        "server.replicas=2: with parallel.nodes=2 machines a server is one replica",
    ),
    "disaggregation on several machines": (
        {**NODES, "disagg": DisaggConfig(role="prefill")},
        "disagg: ranks on parallel.nodes=2 machines transfer no KV yet",
    ),
    "same_bits with settings that it excludes": (
        {"parallel.same_bits": True, "quantization": "w8a8"},
        "parallel.same_bits and quantization=w8a8 exclude each other: ranks quantise",
    ),
    "registration of a server without an address": (
        {"server.register": ("http://g:1",), "server.uds": "/tmp/s"},
        "gateways cannot reach server.uds=/tmp/s; give server.register_url",
    ),
    "proxies without address": (
        {"server.trusted_proxies": ("10.0.0.0/8", "10.0.0.1/8")},
        "server.trusted_proxies: '10.0.0.1/8' is no IP address and no network",
    ),
    "registered as everywhere": (
        {"server.register": ("http://g:1",), "server.host": "0.0.0.0"},
        "server.host=0.0.0.0 is not an address that gateways can reach; give server.register_url",
    ),
    "unknown option": ({"scheduler.policy": "fcsf"}, "did you mean fcfs?"),
    "task that the model does not support": (
        {"task": "classify"},
        "task=classify: this model can be served for generate or embed or both only",
    ),
    "pickled weights": ({}, "--load-format pt reads them"),
    "no such device": ({"device": "cuda"}, "device=cuda: this machine has no such device"),
    "dtype not on this device": (
        {"device": "odd", "dtype": "float16"},
        "device=odd cannot compute with dtype=float16; choose bfloat16 or float32",
    ),
    "attention not installed": (
        {"attention": "absent"},
        "attention=absent is not installed: pip install 'sylvan[absent]', or leave attention at",
    ),
    "attention not with this dtype": (
        {"attention": "half", "dtype": "float32"},
        "attention=half cannot compute with dtype=float32, only with bfloat16 or float16",
    ),
    "attention not with this head size": (
        {"attention": "half"},
        "attention=half has no kernel for heads of 256, at most of 128",
    ),
    "attention not with this cache dtype": (
        {"attention": "half", "cache.dtype": "fp8_e4m3"},
        "attention=half cannot read a KV cache of cache.dtype=fp8_e4m3",
    ),
    "runner not on this device": ({"runner": "program"}, "runner=program does not work"),
    "no attention fits": (
        {"cache.dtype": "int8"},
        "no attention backend fits",
    ),
    "attention not on this device": ({"attention": "elsewhere"}, "does not run on device=cpu"),
    "attention not with this runner": (
        {"attention": "native", "runner": "eager"},
        "attention=native is not part of runner=eager",
    ),
    "attention not with this page size": (
        {"attention": "paged", "cache.page_size": 32, "deterministic": False},
        "attention=paged cannot use cache.page_size=32",
    ),
    "cannot be deterministic": (
        {"attention": "paged", "deterministic": True},
        "deterministic=true cannot be kept: results of attention=paged depend on the batch; leave",
    ),
    "deterministic with a PyTorch fallback": (
        {"deterministic": True, "runner_fallback": True},
        "which runner_fallback=true allows; leave one of them at auto",
    ),
    "no such quantisation": (
        {"quantization": "w4a16"},
        "quantization=w4a16: device=cpu has no kernels for quantised matrices; leave it at none",
    ),
    "quantised activations on a GPU": (
        {"quantization": "w8a8", "device": "odd"},
        "quantization=w8a8 quantises activations to 8 bits, on CPUs only; choose w4a16 or fp8",
    ),
    "context too long": ({"context_len": 4096}, "more than tiny supports, 2048"),
    "policy without cache": (
        {"scheduler.policy": "lpm", "cache.prefix": "none"},
        "scheduler.policy=lpm orders by cached prefixes, but cache.prefix=none",
    ),
    "no recurrent state slot for a request": ({"cache.max_states": 1}, "use at least 2"),
    "events without cache": (
        {"kv_events": KVEventsConfig(), "cache.prefix": "none"},
        "kv_events publishes what is cached, but cache.prefix=none",
    ),
    "prompts do not fit into a step": (
        {"scheduler.chunk_tokens": 0, "scheduler.max_batch_tokens": 64},
        "scheduler.max_batch_tokens=64 must be at least context_len=2048",
    ),
    "chunk larger than a step": (
        {"scheduler.chunk_tokens": 65, "scheduler.max_batch_tokens": 64},
        "scheduler.chunk_tokens=65 is more than scheduler.max_batch_tokens=64",
    ),
    "tokens do not fit into the cache": (
        {"cache.max_tokens": 1 << 20, "cache.memory": 1 << 20},
        "give only one of them",
    ),
    "memory": ({"cache.memory": 1 << 40}, "too little memory"),
    "context does not fit into the cache": (
        {"cache.max_tokens": 64, "context_len": 2048},
        "context_len=2048 does not fit into a KV cache of 64 tokens",
    ),
    "unknown speculative algorithm": (
        {"speculative": SpeculativeConfig(algorithm="ngrm")},
        "speculative.algorithm=ngrm: unknown (did you mean ngram?); there is ngram",
    ),
    "draft model that the algorithm does not use": (
        {"speculative": SpeculativeConfig(algorithm="nextn", draft_model="d")},
        "speculative.algorithm=nextn has no model; leave speculative.draft_model=d out",
    ),
    "no draft model": (
        {"speculative": SpeculativeConfig(algorithm="standalone")},
        "speculative.algorithm=standalone needs a smaller model",
    ),
    "draft model with another vocabulary": (
        {"speculative": STANDALONE},
        "speculative.draft_model=d: its tokenizer differs from that of model=sapling",
    ),
    "draft model that does not generate text": (
        {"speculative": STANDALONE},
        "speculative.draft_model=d does not generate text",
    ),
    "draft model with recurrent layers": (
        {"speculative": STANDALONE},
        "speculative.draft_model=d has recurrent layers",
    ),
    "draft trees without a head": (
        {"speculative": SpeculativeConfig(algorithm="ngram", topk=4)},
        "speculative.topk=4: speculative.algorithm=ngram drafts one continuation",
    ),
    "tree too large": (
        {"speculative": SpeculativeConfig(algorithm="nextn", topk=17)},
        "speculative.topk=17 and speculative.num_draft_tokens=9: trees have at most 16 draft "
        "tokens",
    ),
    "draft tree with too few tokens for its depth": (
        {"speculative": SpeculativeConfig(algorithm="nextn", topk=2, num_draft_tokens=4)},
        "speculative.num_draft_tokens=4 must be more than speculative.num_steps=4, the depth",
    ),
    "num_steps and num_draft_tokens differ": (
        {"speculative": SpeculativeConfig(algorithm="ngram", num_steps=3, num_draft_tokens=8)},
        "speculative.num_draft_tokens=8 must be one more than speculative.num_steps=3",
    ),
    "texts without use": (
        {"speculative": SpeculativeConfig(algorithm="nextn", corpus="f")},
        "speculative.algorithm=nextn searches no texts; leave speculative.corpus=f and",
    ),
    "min_match above max_match": (
        {"speculative": SpeculativeConfig(algorithm="ngram", min_match=5, max_match=4)},
        "speculative.min_match=5 is more than speculative.max_match=4",
    ),
    "speculation not on this device": (
        {"speculative": SpeculativeConfig(algorithm="nextn"), "device": "odd"},
        "speculative.algorithm=nextn: steps on device=odd verify only ngram drafts",
    ),
    "speculation with tensor-parallel GPUs": (
        {
            "speculative": SpeculativeConfig(algorithm="ngram"),
            "device": "odd",
            "parallel.tp": 2,
        },
        "ranks on device=odd verify no drafts; lower parallel.tp=2 to 1",
    ),
    "speculation for a task without generation": (
        {"speculative": SpeculativeConfig(algorithm="ngram"), "task": "embed"},
        "task=embed generates nothing",
    ),
    "speculation with overlapped scheduling": (
        {"speculative": SpeculativeConfig(algorithm="ngram"), "scheduler.overlap": "on"},
        "which is not known yet with scheduler.overlap=on",
    ),
    "unknown faults": ({"chaos": {"sun": "1"}}, "unknown fault 'sun'"),
    "chaos for strangers": (
        {"chaos": {"disk-full": "0.1"}, "server.host": "0.0.0.0"},
        "server.host=0.0.0.0 is a public address",
    ),
    "chaos without processes": (
        {"chaos": {"ipc-delay": "1s"}, "processes": "one"},
        "processes=one leaves no processes for these faults",
    ),
    "TLS key without certificate": ({"server.ssl_keyfile": "k"}, "needs server.ssl_certfile"),
    "client certificates without TLS": (
        {"server.ssl_ca_certs": "ca.pem"},
        "needs server.ssl_certfile",
    ),
}


def complaint(values, facts):
    try:
        check(resolve(replaced(Config(), values), facts), facts)
    except ConfigError as error:
        return str(error)
    return ""


DRAFTS = {
    "draft model with another vocabulary": {"draft": make_model(), "draft_reads_alike": False},
    "draft model that does not generate text": {"draft": make_model(causal=False)},
    "draft model with recurrent layers": {"draft": make_model(state_numbers=100)},
}
MODELS = {
    "attention not with this head size": {"head_dim": 256},
    "more stages than layers": {"num_layers": 4},
    "tiers of vectors": {"causal": False},
    "pickled weights": {"weights": "pt"},
    "no recurrent state slot for a request": {"state_numbers": 100},
}


def facts_for(name):
    if name == "no attention fits":
        attention = {k: v for k, v in make_facts().attention.items() if k != "native"}
        return make_facts(attention=attention)
    if name == "dtype not on this device":
        odd = DeviceFacts(kind="odd", fast_dtypes=frozenset({"float32", "bfloat16"}))
        return make_facts(devices=make_facts().devices | {"odd": odd})
    if name in DRAFTS:
        return make_facts(**DRAFTS[name])
    if name in ("speculation not on this device", "speculation with tensor-parallel GPUs"):
        odd = DeviceFacts(kind="odd")
        return make_facts(devices=make_facts().devices | {"odd": odd})
    if name == "quantised activations on a GPU":
        odd = DeviceFacts(kind="odd", fast_dtypes=frozenset({"bfloat16"}))
        return make_facts(devices=make_facts().devices | {"odd": odd})
    if name in MODELS:
        return make_facts(model=make_model(**MODELS[name]))
    return make_facts()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_can_be_broken(rule):
    values, words = BROKEN[rule.name]

    assert words in complaint(values, facts_for(rule.name))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_name_fields_that_exist(rule):
    assert set(rule.fields) <= {*fields(), *sections()}


def test_rule_names_are_unique():
    assert len({rule.name for rule in RULES}) == len(RULES) == len(BROKEN)


def test_defaults_break_no_rule(facts):
    assert complaint({}, facts) == ""


@pytest.mark.parametrize("device", ["cpu", "odd"])
def test_a_quantised_checkpoint_is_served_everywhere(device):
    odd = DeviceFacts(kind="odd", fast_dtypes=frozenset({"bfloat16"}))
    facts = make_facts(
        model=make_model(quantization="w8a8"), devices=make_facts().devices | {"odd": odd}
    )

    assert "quantis" not in complaint({"device": device}, facts)


def test_formats_that_keep_rows_are_for_gpus_too():
    cuda = DeviceFacts(kind="cuda", fast_dtypes=frozenset({"bfloat16"}))
    facts = make_facts(
        devices=make_facts().devices | {"cuda": cuda}, quantizations=frozenset({"w4a16", "w8a8"})
    )

    assert "quantiz" not in complaint({"device": "cuda", "quantization": "w4a16"}, facts)
    text = complaint({"device": "cuda", "quantization": "w8a8"}, facts)
    assert "quantization=w8a8 quantises activations to 8 bits, on CPUs only" in text


@pytest.mark.parametrize(
    ("more", "way"),
    [
        ({"parallel.tp": 3, "parallel.ep": 3}, "it has kernels for 2, 4 and 8 GPUs, not for paral"),
        (NODES | {"parallel.ep": 2}, "only GPUs of one machine are connected by it here, not par"),
        ({"parallel.tp": 2, "parallel.ep": 2, "lora": LoraConfig()}, "leave out lora, or it"),
        ({"parallel.tp": 4, "parallel.ep": 2}, "use a parallel.ep that equals parallel.tp"),
        ({"parallel.tp": 2, "parallel.ep": 2}, ""),
    ],
)
def test_deepep_is_for_a_few_gpus_of_a_machine_that_have_whole_experts(more, way):
    cuda = DeviceFacts(kind="cuda", fast_dtypes=frozenset({"bfloat16"}))
    facts = make_facts(devices=make_facts().devices | {"cuda": cuda})
    text = complaint({"device": "cuda", "parallel.expert_exchange": "deepep"} | more, facts)

    assert way in text
    assert bool(way) == ("parallel.expert_exchange=deepep" in text)


def test_8_bit_pages_on_jax_are_one_sentence():
    jax = DeviceFacts(
        kind="jax",
        runners=("program",),
        fast_dtypes=frozenset({"bfloat16"}),
        available_bytes=1 << 34,
    )
    facts = make_facts(devices=make_facts().devices | {"jax": jax})
    text = complaint({"device": "jax", "cache.dtype": "int8"}, facts)

    assert text == (
        "device=jax: pages of cache.dtype=int8 have no lowering to JAX; leave cache.dtype at model"
    )


def test_int8_pages_need_an_attention_that_reads_them(facts):
    assert "and cache.dtype=int8; leave one" in complaint({"cache.dtype": "int8"}, facts)


@pytest.mark.parametrize(
    ("setting", "name", "way"),
    [
        ("attention", "fa3", "attention=fa3 is not supported: triton computes the same on GPUs"),
        ("attention", "trtllm-mla", "triton computes latent attention (MLA) on GPUs"),
        ("device", "npu", "device=npu is not supported: install a platform package for it"),
        ("device", "musa", "no platform package for it is known"),
    ],
)
def test_names_of_other_servers_come_with_what_to_use_instead(setting, name, way):
    known = {"attention": ("native", "torch"), "device": ("cpu", "cuda")}
    value = name.replace("-", "_")

    assert way in complaint({setting: value}, make_facts(options=known))


def test_a_device_that_is_not_there_says_why():
    facts = make_facts(absent={"cuda": "no NVIDIA driver is loaded; choose device=cpu"})

    text = complaint({"device": "cuda"}, facts)

    assert "device=cuda: no NVIDIA driver is loaded; choose device=cpu" in text.splitlines()


def test_a_device_of_an_installed_package_says_why_it_is_not_there():
    facts = make_facts(options={"device": ("cpu", "npu")}, absent={"npu": "no driver shows one"})

    assert complaint({"device": "npu"}, facts) == "device=npu: no driver shows one"


def test_all_broken_rules_are_reported_at_once(facts):
    disagg = DisaggConfig(role="prefill")
    text = complaint(
        {"disagg": disagg, "server.replicas": 2, "quantization": "w8a8", "cache.eviction": "lur"},
        facts,
    )

    assert len(text.splitlines()) == 3
    assert "did you mean lru?" in text


def test_too_little_memory_says_how_much_is_missing():
    facts = make_facts(model=make_model(num_params=4_000_000_000))

    text = complaint({}, facts)

    assert "weights 7.451 GiB" in text
    assert "GiB missing" in text
    assert "choose a smaller model" in text


def test_a_cache_of_no_use_is_too_little_memory():
    facts = make_facts(model=make_model(kv_per_token=1 << 25))

    assert "too little memory" in complaint({}, facts)


def test_options_that_are_not_known_yet_are_not_judged():
    facts = make_facts(options={})

    assert complaint({"cache.eviction": "mine"}, facts) == ""


def inexact(**changes):
    """A CPU whose step programs alone keep the bits."""
    cpu = make_facts().devices["cpu"]
    values = {"runners": ("program", "eager"), "exact_runners": frozenset({"program"})}
    return make_facts(devices={"cpu": dataclasses.replace(cpu, **(values | changes))})


@pytest.mark.parametrize(
    ("values", "facts", "words"),
    [
        ({"runner": "eager"}, inexact(), "runner=eager uses PyTorch"),
        ({"attention": "exact"}, inexact(), "runner=eager uses PyTorch"),
        (
            {},
            inexact(runners=("eager",), exact_runners=frozenset()),
            "no native kernels are compiled here",
        ),
        (
            {"device": "cuda", "attention": "elsewhere"},
            make_facts(devices={"cuda": DeviceFacts(kind="cuda", available_bytes=1 << 34)}),
            "PyTorch multiplies matrices on cuda",
        ),
        (
            {"device": "jax"},
            make_facts(devices={"jax": DeviceFacts(kind="jax", available_bytes=1 << 34)}),
            "XLA multiplies matrices on jax",
        ),
    ],
)
def test_deterministic_is_refused_where_it_cannot_be_kept_and_off_by_default(values, facts, words):
    lines = complaint(values | {"deterministic": True}, facts).splitlines()
    resolved = resolve(replaced(Config(), values), facts)

    assert [line for line in lines if line.startswith("deterministic=true cannot be kept: ")]
    assert words in "".join(lines)
    assert resolved.config.deterministic is False
    assert words in resolved.decisions["deterministic"].reason


def test_deterministic_steers_attention_and_runner_and_forbids_to_fall_back():
    resolved = resolve(replaced(Config(), {"deterministic": True}), inexact())

    check(resolved, inexact())
    assert (resolved.config.attention, resolved.config.runner) == ("native", "program")
    assert resolved.config.runner_fallback is False
    assert resolve(Config(), inexact()).config.runner_fallback is True
    assert resolve(Config(), inexact()).config.deterministic is True


@pytest.mark.parametrize("name", ["DSPARK", "dflash"])
def test_algorithms_to_come_are_named_as_such(name):
    given = {"speculative": SpeculativeConfig(algorithm=name.lower())}

    assert "not supported yet" in complaint(given, make_facts())


@pytest.mark.parametrize(
    ("given", "steps"),
    [({}, 10), ({"num_steps": 3}, 3), ({"num_draft_tokens": 5}, 4)],
)
def test_lengths_of_drafts_follow_from_each_other(given, steps):
    asked = {"speculative": SpeculativeConfig(algorithm="ngram", **given)}
    found = resolve(replaced(Config(), asked), make_facts()).config

    assert found.speculative.num_steps == steps
    assert found.speculative.num_draft_tokens == steps + 1
    assert found.scheduler.overlap == "off"
    assert complaint(asked, make_facts()) == ""


@pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa"])
def test_heads_are_named_by_a_directory_and_made_for_the_same_ids(name):
    without = {"speculative": SpeculativeConfig(algorithm=name)}
    asked = {"speculative": SpeculativeConfig(algorithm=name, draft_model="d")}
    other = make_facts(draft=make_model(vocab_size=9, tasks=()), draft_reads_alike=False)

    assert f"speculative.algorithm={name} needs a draft head" in complaint(without, make_facts())
    assert "draft_model=d was made for 9 tokens, model=sapling has" in complaint(asked, other)
    assert complaint(asked, make_facts(draft=make_model(tasks=()))) == ""


def test_the_model_s_own_head_needs_no_directory():
    asked = {"speculative": SpeculativeConfig(algorithm="nextn", draft_model="d")}
    alone = {"speculative": SpeculativeConfig(algorithm="nextn")}

    assert "nextn has no model; leave" in complaint(asked, make_facts())
    assert complaint(alone, make_facts()) == ""
    found = resolve(replaced(Config(), alone), make_facts()).config
    assert found.speculative.num_steps == 4


def test_trees_have_two_drafts_for_each_token_ahead():
    asked = {"speculative": SpeculativeConfig(algorithm="nextn", topk=3, num_steps=5)}
    found = resolve(replaced(Config(), asked), make_facts()).config.speculative

    assert complaint(asked, make_facts()) == ""
    assert (found.num_steps, found.num_draft_tokens) == (5, 11)
    assert found.max_sampled_rows(4) == 4 + 4 * 10
    assert found.max_paths(4) == 4 * 9


def test_states_between_drafts_have_their_part_of_the_memory():
    facts = make_facts(model=make_model(state_numbers=1000))
    given = {"cache.max_tokens": 1024, "scheduler.max_running_reqs": 8, "cache.max_states": 20}
    asked = given | {"speculative": SpeculativeConfig(algorithm="ngram", num_steps=3)}
    plain, found = (resolve(replaced(Config(), each), facts) for each in (given, asked))

    assert complaint(asked, facts) == ""
    assert found.plan.work_bytes - plain.plan.work_bytes >= 4 * 1000 * (8 + 8 * 3 - 1)


def test_a_draft_model_has_its_part_of_the_memory():
    asked = {"speculative": STANDALONE, "cache.max_tokens": 1024}
    plain = resolve(replaced(Config(), {"cache.max_tokens": 1024}), make_facts())
    drafted = resolve(replaced(Config(), asked), make_facts(draft=make_model()))

    assert drafted.plan.kv_bytes == 2 * plain.plan.kv_bytes
    assert drafted.plan.weight_bytes == 2 * plain.plan.weight_bytes
    assert drafted.config.speculative.num_steps == 4
