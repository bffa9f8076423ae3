"""Pipeline stages give the answers of one process, whatever a step does.

All stages are threads of this process, where bits depend on the batch;
`tests/integration/test_stages.py` has native processes, which have the same bits.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import transformers

from sylvan.protocol.commands import HashWeights
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import LogprobOptions
from tests.parity.checkpoints import SHAPE, VOCAB, write
from tests.parity.families import FAMILIES
from tests.parity.rare import RARE
from tests.parity.serving import Serving
from tests.parity.test_ranks import CLOSE, NATIVE, answers, slow
from tests.parity.vectors import make, serve
from tests.support.oracle_drafter import OracleDrafter
from tests.support.stages import build_stages

SOME = ("qwen2", "olmo2", "gpt2", "deepseek-v3")
"""A stream that norms add, one that blocks add, learned positions, and latent vectors."""
MORE = ("llama", "gpt-neox", "cohere", "mixtral", "glm4", "qwen3-moe")
WINDOWS = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
PROMPTS = [[5, 9, 20, 31], [7] * 37, list(range(40, 110)), [5, 9, 20, 31, 8]]


def check_stages(path, stages: int, **given: object) -> None:
    one = Serving(path, **given)
    several = Serving(path, build=build_stages(stages), overlap=True, **given)
    (tokens, rows), (found, found_rows) = answers(one), answers(several)
    one.close()
    several.close()

    assert found == tokens
    assert np.abs(found_rows - rows).max() < CLOSE


@pytest.mark.parametrize("family", SOME)
def test_a_family_is_cut_into_stages(family, tmp_path):
    write(family_config(family), len(family), tmp_path)
    check_stages(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", MORE)
def test_other_families_are_cut_into_stages(family, tmp_path):
    write(family_config(family), len(family), tmp_path)
    check_stages(tmp_path, 3)


def family_config(family: str):
    if family == "qwen2":
        return transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True)
    return NATIVE[family]()


@pytest.mark.slow
def test_each_stage_has_layers_of_all_windows(tmp_path):
    write(transformers.Gemma3TextConfig(**SHAPE | WINDOWS), 5, tmp_path)
    check_stages(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"parallel\.pp=3: some stages would have no layers with"):
        Serving(tmp_path, build=build_stages(3))


@pytest.mark.slow
def test_stages_have_ranks(tmp_path):
    write(transformers.LlamaConfig(**SHAPE), 5, tmp_path)
    two = Serving(tmp_path, build=build_stages(2, tp=2), overlap=True)
    one = Serving(tmp_path)
    (tokens, rows), (found, found_rows) = answers(one), answers(two)
    two.close()

    assert found == tokens
    assert np.abs(found_rows - rows).max() < CLOSE


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("stages")
    write(transformers.Qwen2Config(**SHAPE), 5, path)
    return path


@pytest.mark.parametrize(
    "given",
    [
        {"chunk_tokens": 16, "max_batch_tokens": 19},
        pytest.param(
            {"pages": 8, "conservativeness": 0.1, "preempt_every": 5}, marks=pytest.mark.slow
        ),
    ],
    ids=["chunked", "preempted"],
)
def test_steps_of_all_kinds_go_through_stages(model_dir, given):
    one = Serving(model_dir, **given)
    two = Serving(model_dir, build=build_stages(2), overlap=True, **given)
    for _ in range(2):  # the second time from the cache
        expected = one.generate(PROMPTS, max_new_tokens=12)
        assert two.generate(PROMPTS, max_new_tokens=12) == expected
    sampled = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.4, "max_new_tokens": 12}
    assert two.generate(PROMPTS, **sampled) == one.generate(PROMPTS, **sampled)
    rids = [s.add(PROMPTS[2], logprobs=LogprobOptions(start=1, top=2)) for s in (one, two)]
    for serving in (one, two):
        serving.run()
    found = [s.outputs[rid][0].prompt_logprobs for s, rid in zip((one, two), rids, strict=True)]
    assert np.allclose(found[0].logprobs, found[1].logprobs, atol=CLOSE, equal_nan=True)
    two.close()


def test_each_stage_has_a_batch(model_dir, monkeypatch):
    two = Serving(model_dir, build=build_stages(2), overlap=True)
    launched: list[list[int]] = []
    launch = two.executor.launch

    def noting(plan):
        if plan.num_slices:
            launched.append(sorted(plan.slots.tolist()))
        return launch(plan)

    monkeypatch.setattr(two.executor, "launch", noting)
    two.generate([[5, 9, 20, 31 + i] for i in range(4)], max_new_tokens=20)
    two.close()

    decodes = launched[4:-4]
    assert {len(slots) for slots in decodes} == {2}
    both = itertools.pairwise(decodes)
    assert all(not set(slots) & set(following) for slots, following in both)


def test_a_batch_may_have_all_requests(model_dir, monkeypatch):
    two = Serving(model_dir, build=build_stages(2), overlap=True, stage_batch=3)
    counts: list[int] = []
    launch = two.executor.launch

    def noting(plan):
        counts.append(plan.num_samples)
        return launch(plan)

    monkeypatch.setattr(two.executor, "launch", noting)
    prompts = [[5, 9, 20, 31 + i] for i in range(4)]
    found = two.generate(prompts, max_new_tokens=20)
    two.close()

    assert max(counts[4:]) == 3
    assert found == Serving(model_dir).generate(prompts, max_new_tokens=20)


def test_more_batches_than_stages_may_be_under_way(model_dir):
    three = Serving(model_dir, build=build_stages(2), overlap=True, inflight=3)
    assert three.generate(PROMPTS, max_new_tokens=12) == Serving(model_dir).generate(
        PROMPTS, max_new_tokens=12
    )
    three.close()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_slow_holds_the_other_up_and_changes_nothing(model_dir, stage):
    build = build_stages(2, build=partial(slow, rank=0, stage=stage))
    two = Serving(model_dir, build=build, overlap=True)
    assert two.generate(PROMPTS) == Serving(model_dir).generate(PROMPTS)
    two.close()
    assert two.executor.lost == []


def test_each_stage_keeps_its_layers_and_their_pages(tmp_path):
    write(transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 4}), 5, tmp_path)
    bytes_of = {}
    for stages in (1, 2, 4):
        serving = Serving(tmp_path, build=build_stages(stages))
        bytes_of[stages] = serving.facts.kv_bytes
        serving.close()

    assert bytes_of[2] == bytes_of[1] // 2
    assert bytes_of[4] == bytes_of[1] // 4


def test_a_request_that_is_aborted_leaves_the_others_alone(model_dir):
    expected = Serving(model_dir).generate([[5, 9, 20, 31]], max_new_tokens=40)
    two = Serving(model_dir, build=build_stages(2), overlap=True)
    rids = [two.add(prompt, max_new_tokens=40) for prompt in ([5, 9, 20, 31], [7] * 30)]
    for _ in range(10):
        two.scheduler.step()
    two.scheduler.abort(rids[1], Finish(type="abort", message="enough"))
    two.run()
    refused = two.executor.control(HashWeights()).wait()
    two.add([7] * 30, max_new_tokens=40)
    two.scheduler.step()
    two.close()  # with a step in flight

    assert [two.tokens[rids[0]]] == expected
    assert two.finish[rids[1]].type == "abort"
    assert "while pipeline stages share them" in refused.error


HYBRID = ("jamba", "mamba", "lfm2", "qwen3-next", "bamba")
"""States beside attention, and without any; short convolutions; delta nets; two kinds of states."""


@pytest.mark.parametrize(
    "family", [HYBRID[0], *(pytest.param(name, marks=pytest.mark.slow) for name in HYBRID[1:])]
)
def test_each_stage_keeps_the_states_of_its_layers(family, tmp_path):
    config = NATIVE[family]()
    config.num_hidden_layers = 4
    if family in ("lfm2", "qwen3-next"):
        config.layer_types = [*config.layer_types[:2], *config.layer_types[:2]]
    if family == "bamba":
        config.attn_layer_indices = [1, 3]
    write(config, len(family), tmp_path)
    one = Serving(tmp_path)
    two = Serving(tmp_path, build=build_stages(2), overlap=True)
    expected = one.generate(PROMPTS, max_new_tokens=12)

    assert two.generate(PROMPTS, max_new_tokens=12) == expected
    assert two.generate(PROMPTS, max_new_tokens=12) == expected  # from the cache
    two.close()


@pytest.mark.parametrize("right", [1.0, 0.6])
def test_drafts_are_verified_by_the_last_stage(model_dir, right):
    expected = Serving(model_dir).generate(PROMPTS, max_new_tokens=12)
    answers = {tuple(p): out for p, out in zip(PROMPTS, expected, strict=True)}
    drafter = OracleDrafter(answers, VOCAB, right=right)
    build = build_stages(2)
    two = Serving(model_dir, build=build, overlap=True, capabilities=(drafter,))

    assert two.generate(PROMPTS, max_new_tokens=12) == expected
    assert drafter.drafted > 0
    two.close()


@pytest.mark.parametrize("name", ["qwen3-embed", "llama-classify"])
def test_the_last_stage_makes_vectors_and_labels(name, tmp_path):
    make(name, tmp_path)
    one = serve(tmp_path, runner="eager")
    two = serve(tmp_path, runner="eager", build=build_stages(2), overlap=True)

    for vector, expected in zip(two.embed(PROMPTS), one.embed(PROMPTS), strict=True):
        assert np.abs(vector - expected).max() < CLOSE
    two.close()


REFUSED = {
    "zamba2": (2, "runs through transformers"),
    "llama": (4, "this model has 3 layers; use at most as many stages"),
}


@pytest.mark.parametrize(("family", "found"), REFUSED.items())
def test_models_that_cannot_be_cut_are_refused_by_name(family, found, tmp_path):
    stages, why = found
    write({**FAMILIES, **RARE, **NATIVE}[family](), len(family), tmp_path)

    with pytest.raises(ConfigError, match=rf"parallel\.pp={stages}: .*{why}"):
        Serving(tmp_path, build=build_stages(stages))
