from __future__ import annotations

import dataclasses

import pytest

from sylvan.config.check import check
from sylvan.config.facts import AttentionFacts, DeviceFacts
from sylvan.config.fields import fields, get, replaced
from sylvan.config.resolve import resolve
from sylvan.config.tree import Config, LoraConfig
from tests.support.config_facts import GIB, make_facts, make_model

LEFT_TO_THE_MODEL = {
    *("text.tool_parser", "text.reasoning_parser"),  # its template decides
    "media.encoder_backend",  # its encoder does
}


def config_with(**values):
    return replaced(Config(), {name.replace("__", "."): v for name, v in values.items()})


def gpu_facts(gib=80):
    dtypes = frozenset({"float32", "float16", "bfloat16"})
    gpu = DeviceFacts(
        kind="cuda", total_bytes=gib * GIB, available_bytes=gib * GIB, fast_dtypes=dtypes
    )
    return make_facts(devices=make_facts().devices | {"cuda": gpu})


def cpu_with(**changes):
    cpu = dataclasses.replace(make_facts().devices["cpu"], **changes)
    return make_facts(devices={"cpu": cpu})


def test_ranks_share_the_cores_and_do_not_overlap(facts):
    found = resolve(replaced(Config(), {"parallel.tp": 2}), facts).config

    assert found.threads == facts.devices["cpu"].cores // 2
    assert found.scheduler.overlap == "off"
    assert found.parallel.backend == "gloo"  # no kernels are compiled there


def test_ranks_share_memory_where_kernels_are_compiled(facts):
    cpu = dataclasses.replace(facts.devices["cpu"], runners=("program", "eager"))

    found = resolve(Config(), dataclasses.replace(facts, devices={"cpu": cpu})).config

    assert found.parallel.backend == "shared"


@pytest.mark.parametrize(
    ("given", "value", "reason"),
    [
        ({}, True, "sums depend on the number of ranks"),
        ({"lora": LoraConfig()}, True, "sums depend on the number of ranks"),
        ({"parallel__pp": 2, "parallel__nodes": 2}, True, "sums depend on the number of ranks"),
        ({"parallel__tp": 2}, "auto", "if the model's dimensions divide equally"),
        ({"parallel__tp": 2, "lora": LoraConfig()}, False, "lora: adapter outputs"),
        ({"parallel__tp": 2, "parallel__nodes": 2}, False, "parallel.nodes: steps are not native"),
        ({"quantization": "w8a8"}, False, "quantization: ranks quantise parts of rows"),
        ({"deterministic": False}, False, "deterministic: results depend on the batch then"),
    ],
)
def test_sums_are_alike_on_any_number_of_ranks_where_they_can_be(facts, given, value, reason):
    found = resolve(config_with(**given), facts)

    assert found.config.parallel.same_bits == value
    assert found.decisions["parallel.same_bits"].reason.startswith(reason)


def test_sums_of_a_quantised_checkpoint_depend_on_the_ranks():
    found = resolve(Config(), make_facts(model=make_model(quantization="w4a16")))

    assert found.config.parallel.same_bits is False


def test_nothing_stays_auto_but_what_the_model_decides(facts):
    resolved = resolve(Config(), facts)

    left = {path for path in fields() if get(resolved.config, path) == "auto"}
    assert left == LEFT_TO_THE_MODEL
    check(resolved, facts)


def test_each_decision_is_in_the_tree_and_has_a_reason(facts):
    resolved = resolve(Config(), facts)

    for path, decision in resolved.decisions.items():
        assert get(Config(), path) == "auto"
        assert get(resolved.config, path) == decision.value
        assert decision.reason


def test_resolving_again_changes_nothing(facts):
    once = resolve(Config(), facts)
    twice = resolve(once.config, facts)

    assert twice.config == once.config
    assert twice.decisions == {}
    assert twice.plan.num_pages == once.plan.num_pages
    check(twice, facts)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("dtype", "float32"),
        ("deterministic", False),
        ("attention", "paged"),
        ("cache.page_size", 64),
        ("cache.memory", 1 << 28),
        ("cache.max_tokens", 1000),
        ("scheduler.policy", "fcfs"),
        ("scheduler.max_batch_tokens", 100),
        ("scheduler.chunk_tokens", 0),
        ("scheduler.max_running_reqs", 3),
        ("scheduler.overlap", "on"),
        ("threads", 1),
        ("context_len", 100),
    ],
)
def test_a_given_value_is_never_changed(facts, path, value):
    resolved = resolve(config_with(**{path: value}), facts)

    assert get(resolved.config, path) == value
    assert path not in resolved.decisions


def test_cpu_is_deterministic_and_picks_attention_that_is(facts):
    config = resolve(Config(), facts).config

    assert (config.device, config.deterministic, config.attention) == ("cpu", True, "exact")


def test_attention_is_the_first_that_fits(facts):
    assert resolve(config_with(deterministic=False), facts).config.attention == "paged"
    config = config_with(deterministic=False, cache__page_size=32)
    assert resolve(config, facts).config.attention == "exact"


def test_runner_is_the_first_that_attention_supports():
    native = cpu_with(runners=("program", "eager"))

    assert resolve(config_with(attention="native"), native).config.runner == "program"
    assert resolve(config_with(attention="exact"), native).config.runner == "eager"
    assert resolve(config_with(runner="program"), native).config.attention == "native"


def test_overlap_on_a_cpu_needs_a_native_step_and_a_core_that_it_leaves_idle():
    native = {"runners": ("program", "eager")}
    spare = config_with(runner="program", threads=3)

    assert resolve(spare, cpu_with(**native, cores=4)).config.scheduler.overlap == "on"
    assert resolve(spare, cpu_with(**native, cores=3)).config.scheduler.overlap == "off"
    whole = resolve(config_with(runner="program"), cpu_with(**native, cores=4)).config
    assert whole.scheduler.overlap == "off"
    assert resolve(Config(), cpu_with(**native)).config.scheduler.overlap == "off"
    assert resolve(Config(), gpu_facts()).config.scheduler.overlap == "on"


@pytest.mark.parametrize(("gib", "tokens"), [(16, 2048), (24, 4096), (80, 8192), (192, 16384)])
def test_step_of_a_gpu_grows_with_its_memory(gib, tokens):
    config = resolve(Config(), gpu_facts(gib)).config

    assert config.device == "cuda"
    assert config.scheduler.max_batch_tokens == tokens


def test_step_of_a_cpu_shrinks_with_the_model():
    big = make_facts(model=make_model(num_params=500_000_000))

    assert resolve(Config(), make_facts()).config.scheduler.max_batch_tokens == 2048
    assert resolve(Config(), big).config.scheduler.max_batch_tokens == 512


def test_dtype_is_the_checkpoints_where_it_is_fast():
    slow = cpu_with(fast_dtypes=frozenset({"float32"}))

    assert resolve(Config(), make_facts()).config.dtype == "bfloat16"
    assert resolve(Config(), slow).config.dtype == "float32"


def test_rows_of_quantised_matrices_are_bfloat16_where_that_is_fast():
    half, quantised = {"dtype": "float16"}, {"dtype": "float16", "quantization": "w4a8"}
    slow = cpu_with(fast_dtypes=frozenset({"float32"}))
    slow = dataclasses.replace(slow, model=make_model(**quantised))

    assert resolve(Config(), make_facts(model=make_model(**half))).config.dtype == "float32"
    assert resolve(Config(), make_facts(model=make_model(**quantised))).config.dtype == "bfloat16"
    assert resolve(Config(), slow).config.dtype == "float32"


def test_policy_follows_the_cache(facts):
    assert resolve(Config(), facts).config.scheduler.policy == "lpm"
    assert resolve(config_with(cache__prefix="none"), facts).config.scheduler.policy == "fcfs"


def test_unsplit_prompts_get_a_step_that_holds_the_longest():
    facts = make_facts(model=make_model(context_len=10_000))
    config = resolve(config_with(scheduler__chunk_tokens=0), facts).config

    assert config.scheduler.max_batch_tokens == 10_000


@pytest.mark.parametrize(("chunk", "step"), [(4096, 4096), (1 << 20, 10_000), (300, 512)])
def test_chunks_get_a_step_that_holds_them(chunk, step):
    model = make_model(context_len=10_000, num_params=2_000_000_000)
    roomy = cpu_with(total_bytes=64 * GIB, available_bytes=64 * GIB)
    facts = dataclasses.replace(roomy, model=model)
    result = resolve(config_with(scheduler__chunk_tokens=chunk), facts)

    assert result.config.scheduler.max_batch_tokens == step
    check(result, facts)


def test_grammar_backend_is_one_that_is_installed(facts):
    options = dict(facts.options) | {"grammar.backend": ("llguidance", "outlines")}

    assert resolve(Config(), facts).config.grammar.backend == "none"
    assert resolve(Config(), make_facts(options=options)).config.grammar.backend == "llguidance"

    options["grammar.backend"] = ("combined", "llguidance", "xgrammar")
    assert resolve(Config(), make_facts(options=options)).config.grammar.backend == "combined"


def test_running_requests_are_no_more_than_tokens_of_a_step(facts):
    config = resolve(config_with(scheduler__max_batch_tokens=7), facts).config

    assert config.scheduler.max_running_reqs == 7
    assert config.scheduler.chunk_tokens == 7


# -- memory ------------------------------------------------------------------------------------


def test_plan_counts_every_byte(facts):
    plan = resolve(config_with(cache__memory=64 << 20), facts).plan

    assert plan.weight_bytes == 5_000_000 * 2
    assert plan.work_bytes == 4 * (2048 * 4096 + 2 * 256 * 4096)
    assert plan.kv_bytes_per_token == 1536 * 2
    assert plan.page_size == 16
    assert plan.num_tokens == (64 << 20) // 3072 // 16 * 16
    assert plan.num_pages * 16 == plan.num_tokens
    assert plan.total_bytes == plan.weight_bytes + plan.work_bytes + plan.kv_bytes
    assert "KV cache 64 MiB" in plan.describe() or "KV cache 63.9" in plan.describe()


def test_int8_pages_hold_a_scale_for_each_head():
    native = AttentionFacts(devices=frozenset({"cpu"}), kv_dtypes=frozenset({"model", "int8"}))
    facts = make_facts(model=make_model(head_dim=64), attention={"native": native})

    plan = resolve(config_with(cache__dtype="int8"), facts).plan

    assert plan.kv_bytes_per_token == 1536 + 1536 // 64 * 4


def test_quantised_weights_are_smaller():
    facts = make_facts(quantizations=frozenset({"w8a8", "w4a8"}))
    sizes = [
        resolve(config_with(quantization=q), facts).plan.weight_bytes
        for q in (None, "w8a8", "w4a8")
    ]

    assert sizes == [10_000_000, 6_125_000, 4_250_000]


def test_auto_memory_has_room_for_all_requests_if_there_is_enough(facts):
    plan = resolve(config_with(scheduler__max_running_reqs=4), facts).plan

    assert plan.num_tokens == 4 * 2048


def test_auto_memory_takes_half_of_what_is_free_on_a_cpu():
    facts = make_facts(model=make_model(kv_per_token=1536 * 64))
    plan = resolve(Config(), facts).plan

    assert 2 * GIB - 2 * plan.page_size * plan.kv_bytes_per_token < plan.total_bytes <= 2 * GIB


def test_fraction_is_the_share_of_weights_and_cache_together(facts):
    plan = resolve(config_with(cache__memory=0.25), facts).plan
    page = plan.page_size * plan.kv_bytes_per_token

    assert 0.25 * 8 * GIB - page < plan.weight_bytes + plan.kv_bytes <= 0.25 * 8 * GIB


def test_max_tokens_are_rounded_up_to_pages(facts):
    resolved = resolve(config_with(cache__max_tokens=1000), facts)

    assert resolved.plan.num_tokens == 1008
    assert resolved.config.cache.max_tokens == 1000


def test_context_shrinks_to_the_cache_only_if_auto(facts):
    resolved = resolve(config_with(cache__max_tokens=1024), facts)

    assert resolved.config.context_len == 1024
    assert "holds no more" in resolved.decisions["context_len"].reason


def test_ranks_with_a_gpu_each_use_the_memory_of_all_of_them():
    """A model that is too large for one."""
    facts = dataclasses.replace(gpu_facts(20), model=make_model(num_params=30_000_000_000))
    one = resolve(config_with(device="cuda", dtype="bfloat16"), facts)
    four = resolve(config_with(device="cuda", dtype="bfloat16", parallel__tp=4), facts)

    assert one.plan.num_tokens == 0
    assert four.plan.num_tokens > 0
    assert four.config.parallel.backend == "shared"
    nodes = {"parallel__tp": 4, "parallel__nodes": 2, "parallel__address": "h:1"}
    assert resolve(config_with(device="cuda", **nodes), facts).config.parallel.backend == "nccl"
