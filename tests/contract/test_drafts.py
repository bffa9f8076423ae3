"""Draft tokens in the step contract: several sampled rows a slice, verified along chains and trees.

The tokens equal those of plain decoding for all drafts: a row draws by seed and position.
"""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.kernels.native.library import describe
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.executor.verify import accepted_path
from tests.parity.serving import Serving
from tests.support.on_device import OnDevice
from tests.support.oracle_drafter import OracleDrafter
from tests.support.random_model import VOCAB, write_random_model
from tests.support.ranks import build_ranks

PROMPTS = [[5, 9, 200, 31], [7] * 17, list(range(40, 60)), [5, 9, 200, 31, 8]]
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    "seeded": {"temperature": 1.3, "sampling_seed": 77},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=128)


@pytest.fixture(scope="module")
def expected(model_dir):
    """Tokens of plain decoding, op by op."""
    return plain_answers(model_dir, "eager")


@pytest.fixture(scope="module")
def native_expected(model_dir):
    """Tokens of plain decoding in native steps."""
    if describe().variant is None:
        pytest.skip("kernels are not compiled")
    return plain_answers(model_dir, "program")


def plain_answers(model_dir, runner):
    serving = Serving(model_dir, **how(runner))
    return {way: serving.generate(PROMPTS, max_new_tokens=24, **ask) for way, ask in WAYS.items()}


def how(runner, attention="reference"):
    if runner == "program":
        return {"runner": "program"}
    return {"options": {"attention": attention}}


def drafting(model_dir, answers, *, runner="eager", attention="reference", **options):
    shape = options.pop("shape", {})
    by_prompt = {tuple(p): a for p, a in zip(PROMPTS, answers, strict=True)}
    drafter = OracleDrafter(by_prompt, VOCAB, **shape)
    asked = how(runner, attention)
    asked["options"] = asked.get("options", {}) | options.pop("options", {})
    return Serving(model_dir, capabilities=(drafter,), **asked | options), drafter


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_tokens_are_those_without_drafts(model_dir, expected, way, tree, right):
    shape = {"right": right, "tree": tree}
    serving, drafter = drafting(model_dir, expected[way], shape=shape)

    assert serving.generate(PROMPTS, max_new_tokens=24, **WAYS[way]) == expected[way]
    assert drafter.drafted > 50
    assert serving.scheduler.audit() == 0


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_right_drafts_save_steps(model_dir, expected, tree):
    serving, _ = drafting(model_dir, expected["greedy"], shape={"tree": tree})
    serving.generate(PROMPTS, max_new_tokens=24)

    assert serving.scheduler.load().steps <= 8  # 24 tokens each: a prompt, then 5 a step


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_native_steps_verify_chains(model_dir, native_expected, way, right):
    shape = {"right": right, "count": 7}
    serving, drafter = drafting(model_dir, native_expected[way], runner="program", shape=shape)

    assert serving.generate(PROMPTS, max_new_tokens=24, **WAYS[way]) == native_expected[way]
    assert drafter.drafted > 50
    assert serving.scheduler.audit() == 0
    if right == 1.0:
        assert serving.scheduler.load().steps <= 6


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_devices_verify_chains(model_dir, expected, way, right):
    build = OnDevice()
    shape = {"right": right}
    serving, drafter = drafting(model_dir, expected[way], build=build, shape=shape)

    assert serving.generate(PROMPTS, max_new_tokens=24, **WAYS[way]) == expected[way]
    assert drafter.drafted > 50
    assert serving.scheduler.audit() == 0
    assert build.platform.late.max_waiting > 1, "nothing was ever late"
    load = serving.scheduler.load()
    assert load.proposed_draft_tokens > 50
    if right == 1.0:
        assert load.steps <= 8
        assert load.accepted_draft_tokens == load.proposed_draft_tokens


def test_devices_draw_no_drafts_of_penalised_requests(model_dir, expected):
    """Each draw counts for the next, which a device would not know of: they decode plainly."""
    penalised = {"frequency_penalty": 0.8, "repetition_penalty": 1.3, "max_new_tokens": 24}
    plain = Serving(model_dir)
    wanted = [plain.add(prompt, **penalised) for prompt in PROMPTS[:2]]
    plain.run()
    serving, _ = drafting(model_dir, expected["greedy"], build=OnDevice())
    found = [serving.add(prompt, **penalised) for prompt in PROMPTS[:2]]
    beside = [serving.add(prompt, max_new_tokens=24) for prompt in PROMPTS[2:]]
    serving.run()

    assert [serving.tokens[rid] for rid in found] == [plain.tokens[rid] for rid in wanted]
    assert [serving.tokens[rid] for rid in beside] == expected["greedy"][2:]
    load = serving.scheduler.load()
    assert 30 < load.accepted_draft_tokens < load.proposed_draft_tokens
    assert serving.scheduler.audit() == 0


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_log_probabilities_have_the_bits_of_plain_steps(model_dir, native_expected, share):
    everything = LogprobOptions(top=3, token_ids=tuple(range(0, VOCAB, 7)))
    plain = Serving(model_dir, runner="program")
    drafted, _ = drafting(
        model_dir, native_expected["sampled"], runner="program", shape={"right": share}
    )
    for serving in (plain, drafted):
        for prompt in PROMPTS:
            serving.add(prompt, max_new_tokens=24, logprobs=everything, **WAYS["sampled"])
        serving.run()

    for rid, tokens in plain.tokens.items():
        assert drafted.tokens[rid] == tokens
        for field in ("logprobs", "top_ids", "top_logprobs", "chosen_logprobs"):
            want, got = (
                np.concatenate([getattr(o.logprobs, field) for o in outputs])
                for outputs in (plain.outputs[rid], drafted.outputs[rid])
            )
            assert np.array_equal(want, got), field


@pytest.mark.parametrize("runner", ["eager", "program"])
def test_a_draft_beside_part_of_a_prompt_samples_for_its_own_request(
    model_dir, native_expected, runner
):
    """As many sampled rows as slices, but not one a slice."""
    answer = native_expected["seeded"][0]
    serving, drafter = drafting(
        model_dir,
        [answer, *native_expected["seeded"][1:]],
        runner=runner,
        shape={"count": 1},
        chunk_tokens=8,
    )
    asked = {"max_new_tokens": 8, **WAYS["seeded"]}
    first = serving.add(PROMPTS[0], **asked)
    for _ in range(2):
        serving.scheduler.step()
    long = [int(i) for i in np.random.default_rng(3).integers(4, 200, 60)]
    second = serving.add(long, **asked, frequency_penalty=0.5)
    serving.run()

    alone = Serving(model_dir, **how(runner))
    assert serving.tokens[first] == answer[:8]
    assert serving.tokens[second] == alone.generate([long], **asked, frequency_penalty=0.5)[0]
    assert drafter.drafted > 2


def test_steps_sample_no_more_rows_than_there_is_room_for(model_dir, native_expected):
    serving, drafter = drafting(
        model_dir, native_expected["greedy"], runner="program", options={"max_samples": 9}
    )
    assert serving.generate(PROMPTS, max_new_tokens=24) == native_expected["greedy"]
    assert serving.executor.caps.max_samples == 9
    assert drafter.drafted > 10


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["eager", "program"])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_go_with_chunks_retraction_and_a_warm_cache(
    model_dir, native_expected, runner, seed
):
    tree = seed % 2 == 0 and runner == "eager"
    serving, _ = drafting(
        model_dir,
        native_expected["sampled"],
        runner=runner,
        shape={"right": 0.6, "tree": tree, "seed": seed, "count": 3},
        pages=7 if runner == "program" else 14,
        page_size=16 if runner == "program" else 8,
        chunk_tokens=8,
        max_batch_tokens=48,
        conservativeness=0.0,
    )
    for _ in range(2):
        found = serving.generate(PROMPTS, max_new_tokens=24, **WAYS["sampled"])
        assert found == native_expected["sampled"]

    load = serving.scheduler.load()
    assert load.retractions > 0
    assert load.cached_prompt_tokens > 0
    assert serving.scheduler.audit() == 0


PATHS = {"tree_paths": 48, "tree_depth": 6}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("size", [16, 32])
def test_native_steps_verify_trees_path_by_path(model_dir, native_expected, way, right, size):
    serving, drafter = drafting(
        model_dir,
        native_expected[way],
        runner="program",
        shape={"right": right, "tree": True, "seed": size},
        page_size=size,
        options=PATHS,
    )
    for _ in range(2):
        found = serving.generate(PROMPTS, max_new_tokens=24, **WAYS[way])
        assert found == native_expected[way]
    assert drafter.drafted > 100
    assert serving.scheduler.load().verified_drafts > 20
    assert serving.scheduler.audit() == 0
    if right == 1.0:
        assert serving.scheduler.load().steps <= 16


def test_trees_have_the_log_probabilities_of_plain_steps(model_dir, native_expected):
    everything = LogprobOptions(top=3, token_ids=tuple(range(0, VOCAB, 7)))
    plain = Serving(model_dir, runner="program")
    drafted, _ = drafting(
        model_dir,
        native_expected["sampled"],
        runner="program",
        shape={"right": 0.7, "tree": True},
        options=PATHS,
    )
    ask = WAYS["sampled"] | {"frequency_penalty": 0.3}
    for serving in (plain, drafted):
        for prompt in PROMPTS:
            serving.add(prompt, max_new_tokens=24, logprobs=everything, **ask)
        serving.run()

    for rid, tokens in plain.tokens.items():
        assert drafted.tokens[rid] == tokens
        want, got = (
            np.concatenate([o.logprobs.chosen_logprobs for o in outputs])
            for outputs in (plain.outputs[rid], drafted.outputs[rid])
        )
        assert np.array_equal(want, got)


@pytest.mark.parametrize("seed", range(3))
def test_trees_go_with_chunks_retraction_and_little_room(model_dir, native_expected, seed):
    serving, _ = drafting(
        model_dir,
        native_expected["sampled"],
        runner="program",
        shape={"right": 0.6, "tree": True, "seed": seed, "count": 3},
        pages=7,
        chunk_tokens=8,
        max_batch_tokens=48,
        conservativeness=0.0,
        options={"tree_paths": 5, "tree_depth": 3},
    )
    for _ in range(2):
        found = serving.generate(PROMPTS, max_new_tokens=24, **WAYS["sampled"])
        assert found == native_expected["sampled"]
    assert serving.scheduler.load().retractions > 0
    assert serving.scheduler.audit() == 0


def test_other_attention_verifies_trees_path_by_path(model_dir, expected):
    serving, _ = drafting(
        model_dir, expected["greedy"], attention="torch", shape={"tree": True}, options=PATHS
    )
    assert serving.generate(PROMPTS, max_new_tokens=24) == expected["greedy"]
    assert serving.scheduler.load().steps <= 8


def test_trees_that_a_backend_cannot_verify_cost_speed_only(model_dir, expected):
    serving, drafter = drafting(
        model_dir, expected["greedy"], attention="torch", shape={"tree": True}
    )

    assert serving.generate(PROMPTS, max_new_tokens=24) == expected["greedy"]
    assert drafter.drafted > 0
    assert serving.scheduler.load().steps == 24


def test_the_longest_right_path_is_accepted():
    parents, drafted = (-1, -1, 0, 1, 1, 4), (7, 8, 9, 9, 3, 5)

    assert accepted_path(parents, drafted, [8, 0, 3, 0, 0, 5, 0]) == [1, 4, 5]
    assert accepted_path(parents, drafted, [7, 9, 0, 0, 0, 0, 0]) == [0, 2]
    assert accepted_path(parents, drafted, [1, 9, 0, 0, 0, 0, 0]) == []


@pytest.mark.slow
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_ranks_verify_what_one_verifies(model_dir, expected, tree):
    serving, drafter = drafting(
        model_dir,
        expected["sampled"],
        shape={"right": 0.6, "tree": tree},
        build=build_ranks(2),
        options=PATHS,
    )
    plain = Serving(model_dir, build=build_ranks(2), options={"attention": "reference"})
    ask = WAYS["sampled"] | {"max_new_tokens": 24}

    assert serving.generate(PROMPTS, **ask) == plain.generate(PROMPTS, **ask)
    assert drafter.drafted > 50
    assert serving.scheduler.load().verified_drafts > 10
    for each in (serving, plain):
        each.close()
