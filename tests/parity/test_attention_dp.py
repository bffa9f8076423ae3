"""Groups of ranks that have the KV of different requests give the answers of one rank.

All ranks are threads of this process; `tests/integration/test_attention_dp.py` has processes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers

from sylvan.kernels.collective.reference import thread_ranks
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.cache.by_rank import CachesByRank, capacity_tokens
from sylvan.runtime.layers.mesh import Mesh, SingleRank
from sylvan.runtime.layers.placement import ExpertPlacement
from tests.parity.checkpoints import SHAPE, VOCAB, write
from tests.parity.families import FALLBACK, FAMILIES
from tests.parity.rare import RARE
from tests.parity.serving import Serving
from tests.parity.test_ranks import CLOSE, NATIVE, answers
from tests.parity.vectors import make, serve
from tests.support.oracle_drafter import OracleDrafter
from tests.support.ranks import build_ranks

SOME = ("deepseek-v3", "mixtral")
"""Latent attention beside shared and routed experts; groups of heads beside experts."""
MORE = ("gpt-oss", "olmo2", "cohere", "qwen3-moe", "glm4", "deepseek-v2", "bitnet")
"""Windows and sinks, norms over all heads, and blocks of other shapes."""
PROMPTS = [[5, 9, 20, 31], [7] * 37, list(range(40, 110)), [5, 9, 20, 31, 8]]


def grouped(path: Path, size: int = 2, groups: int = 2, ep: int = 1, **given: object) -> Serving:
    """`size` ranks in so many groups, each with requests of its own."""
    each = size // groups
    made = [thread_ranks(each) if each > 1 else (SingleRank(),) for _ in range(groups)]
    seats = [seat for group in made for seat in group]

    def mesh_of(rank):
        placement = ExpertPlacement(ep) if ep > 1 else None
        return Mesh(rank, ep, placement, attention=seats[rank.rank])

    return Serving(path, build=build_ranks(size, mesh_of=mesh_of), **given)


def checked(path: Path, ways: list[Serving]) -> None:
    one = Serving(path)
    tokens, rows = answers(one)
    for serving in ways:
        found, found_rows = answers(serving)
        assert isinstance(serving.cache, CachesByRank)
        assert sum(part.cached_tokens > 0 for part in serving.cache.parts) == len(tokens)
        serving.close()
        assert serving.executor.lost == []
        assert found == tokens
        assert np.abs(found_rows - rows).max() < CLOSE


@pytest.mark.parametrize("family", SOME)
def test_each_rank_attends_for_its_own_requests(family, tmp_path):
    write(NATIVE[family](), len(family), tmp_path)
    checked(tmp_path, [grouped(tmp_path), grouped(tmp_path, ep=2)])


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*MORE} & {*NATIVE}))
def test_other_families_attend_so_too(family, tmp_path):
    write(NATIVE[family](), len(family), tmp_path)
    checked(tmp_path, [grouped(tmp_path)])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek-v3", "olmo2"])
def test_ranks_of_a_group_share_the_heads(family, tmp_path):
    write(NATIVE[family](), len(family), tmp_path)
    checked(tmp_path, [grouped(tmp_path, 4, 2), grouped(tmp_path, 4, 4)])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("groups")
    write(NATIVE["deepseek-v3"](), 5, path)
    return path


def test_pages_are_divided_among_the_ranks(model_dir):
    one, two = Serving(model_dir), grouped(model_dir)
    try:
        assert two.facts.kv_bytes == one.facts.kv_bytes // 2
        assert capacity_tokens(two.cache) == capacity_tokens(one.cache)
        assert two.cache.total_tokens == one.cache.total_tokens // 2
    finally:
        two.close()


def test_a_single_request_leaves_the_other_rank_without_rows(model_dir):
    two = grouped(model_dir)
    assert two.generate(PROMPTS[1:2]) == Serving(model_dir).generate(PROMPTS[1:2])
    assert sorted(part.cached_tokens > 0 for part in two.cache.parts) == [False, True]
    two.close()


@pytest.mark.parametrize(
    "given",
    [
        {"chunk_tokens": 16, "max_batch_tokens": 19},
        pytest.param(
            {"pages": 16, "conservativeness": 0.1, "preempt_every": 5}, marks=pytest.mark.slow
        ),
        pytest.param({"page_size": 4, "pages": 400}, marks=pytest.mark.slow),
        pytest.param({"overlap": True}, marks=pytest.mark.slow),
    ],
    ids=["chunked", "preempted", "small pages", "launched ahead"],
)
def test_steps_of_all_kinds_are_followed(model_dir, given):
    one, two = Serving(model_dir, **given), grouped(model_dir, **given)
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
    assert two.executor.lost == []


@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_preempts_there(model_dir):
    given = {"pages": 12, "page_size": 4, "conservativeness": 0.0}
    prompts = [[5 + i, 9, 20, 31] for i in range(6)]
    two = grouped(model_dir, **given)
    expected = Serving(model_dir).generate(prompts, max_new_tokens=14)
    assert two.generate(prompts, max_new_tokens=14) == expected
    assert two.scheduler.load().retractions > 0
    two.close()


def test_a_request_that_is_aborted_leaves_the_others_alone(model_dir):
    expected = Serving(model_dir).generate(PROMPTS[:1], max_new_tokens=40)
    two = grouped(model_dir)
    rids = [two.add(prompt, max_new_tokens=40) for prompt in (PROMPTS[0], [7] * 30)]
    for _ in range(10):
        two.scheduler.step()
    two.scheduler.abort(rids[1], Finish(type="abort", message="enough"))
    two.run()
    two.close()

    assert [two.tokens[rids[0]]] == expected
    assert two.finish[rids[1]].type == "abort"


def test_a_prompt_that_fits_into_no_group_is_refused(model_dir):
    two = grouped(model_dir, pages=8)
    with pytest.raises(Exception, match="64 would fit"):
        two.add([7] * 90)
    assert two.generate(PROMPTS[:1]) == Serving(model_dir).generate(PROMPTS[:1])
    two.close()


REFUSED = {
    "jamba": "keeps recurrent states",
    "deepseek-v32": "has attention layers that do not support it",
}


@pytest.mark.parametrize(("family", "why"), REFUSED.items())
def test_models_whose_attention_is_of_all_requests_are_refused(family, why, tmp_path):
    write({**FAMILIES, **RARE, **FALLBACK, **NATIVE}[family](), len(family), tmp_path)
    with pytest.raises(ConfigError, match=rf"^parallel\.attention_dp=2: \w+ {why}"):
        grouped(tmp_path)


def test_ranks_that_do_not_divide_are_refused(tmp_path):
    write(transformers.LlamaConfig(**SHAPE), 5, tmp_path)
    with pytest.raises(ConfigError, match=r"num_attention_heads \(4\) does not divide by 3 ranks"):
        grouped(tmp_path, 6, 2)


def test_drafts_are_verified_by_the_rank_that_has_the_request(model_dir):
    expected = Serving(model_dir).generate(PROMPTS, max_new_tokens=12)
    answers_of = {tuple(p): out for p, out in zip(PROMPTS, expected, strict=True)}
    drafter = OracleDrafter(answers_of, VOCAB, right=0.7)
    two = grouped(model_dir, capabilities=(drafter,))

    assert two.generate(PROMPTS, max_new_tokens=12) == expected
    assert drafter.drafted > 0
    two.close()
    assert two.executor.lost == []


@pytest.mark.parametrize("name", ["qwen3-embed", "llama-classify"])
def test_vectors_are_made_where_the_request_is(name, tmp_path):
    make(name, tmp_path)
    build = build_ranks(2, mesh_of=lambda rank: Mesh(rank, attention=SingleRank()))
    one, two = serve(tmp_path, runner="eager"), serve(tmp_path, runner="eager", build=build)

    for vector, expected in zip(two.embed(PROMPTS), one.embed(PROMPTS), strict=True):
        assert np.abs(vector - expected).max() < CLOSE
    two.close()
