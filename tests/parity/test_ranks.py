"""Ranks that share a model give the answers of one rank: every native family, and what a step does.

All ranks are threads of this process; `tests/integration/test_ranks.py` has processes.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
import transformers

from sylvan.kernels.collective.reference import thread_ranks
from sylvan.protocol.errors import ConfigError, RankLostError
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from sylvan.runtime.layers.mesh import Mesh, SingleRank
from sylvan.runtime.models.registry import load_config
from sylvan.runtime.platform.find import load_kinds
from sylvan.runtime.platform.host import open_host
from tests.parity.checkpoints import FAMILIES as BASE
from tests.parity.checkpoints import SHAPE, VOCAB, write
from tests.parity.families import FALLBACK, FAMILIES
from tests.parity.rare import RARE
from tests.parity.serving import Serving, build_standard
from tests.parity.vectors import make, serve
from tests.support.grammar import END, build_byte_grammar
from tests.support.random_model import write_random_model
from tests.support.ranks import build_ranks

THROUGH_TRANSFORMERS = {
    *FALLBACK,
    *(
        "apertus1p5-text",
        "lara-mini",
        "bailing-hybrid",
        "beam",
        "afmoe",
        "ctrl",
        "diffllama",
        "falcon-h1",
        "gemma4",
    ),
    *("gemma4-unified", "kolibri1", "laguna", "lfm3", "minimax-m3"),
    *("modernbert-decoder", "nemotron-h", "olmo-hybrid", "zamba2", "zaya", "cohere2-moe"),
    *("dory", "hrm-text", "mimo-v2-flash", "roc-bert-decoder", "gemma3n", "gemma4-experts"),
    "gemma4-shared",
}
NATIVE = {n: f for n, f in {**BASE, **FAMILIES, **RARE}.items() if n not in THROUGH_TRANSFORMERS}
FOUR_RANKS = ("llama", "olmo2", "gpt-oss", "deepseek-v3", "mixtral", "jamba", "gpt-bigcode")
"""With more ranks than heads of keys, where there are 2 or 1."""
EVERYTHING = LogprobOptions(token_ids=tuple(range(VOCAB)))
LENGTHS = 29, 3
CLOSE = 2e-3
"""Log probabilities in float32, whose sums are taken in another order."""


def answers(serving: Serving, new: int = 6) -> tuple[list[list[int]], np.ndarray]:
    rng = np.random.default_rng(7)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in LENGTHS]
    rids = [serving.add(p, logprobs=EVERYTHING, max_new_tokens=new) for p in prompts]
    serving.run()
    rows = [out.logprobs.chosen_logprobs for rid in rids for out in serving.outputs[rid]]
    return [serving.tokens[rid] for rid in rids], np.concatenate(rows)


def check_ranks(path: Path, size: int, **given: object) -> None:
    one, several = Serving(path, **given), Serving(path, build=build_ranks(size), **given)
    (tokens, rows), (found, found_rows) = answers(one), answers(several)
    one.close()
    several.close()

    assert found == tokens
    assert np.abs(found_rows - rows).max() < CLOSE
    assert several.executor.lost == []


@pytest.mark.parametrize("family", FOUR_RANKS)
def test_a_family_is_divided_between_two_ranks(family, tmp_path):
    between_two_ranks(family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*NATIVE} - {*FOUR_RANKS}))
def test_every_other_family_is_divided_between_two_ranks(family, tmp_path):
    between_two_ranks(family, tmp_path)


def between_two_ranks(family, tmp_path):
    write(NATIVE[family](), len(family), tmp_path)
    assert load_config(tmp_path).path == "native"

    check_ranks(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FOUR_RANKS)
def test_a_family_is_divided_among_four_ranks(family, tmp_path):
    write(NATIVE[family](), len(family), tmp_path)

    check_ranks(tmp_path, 4)


@pytest.mark.parametrize("family", ["cohere-qk-norm", "zamba2"])
def test_a_model_that_runs_through_transformers_is_refused(family, tmp_path):
    write({**FALLBACK, **RARE}[family](), len(family), tmp_path)

    with pytest.raises(ConfigError, match=r"parallel\.tp=2: .* runs through transformers"):
        Serving(tmp_path, build=build_ranks(2))


@pytest.mark.parametrize("name", ["bert-classify", "modernbert-embed", "electra-embed"])
def test_vectors_are_those_of_one_rank(name, tmp_path):
    make(name, tmp_path)
    prompts = [[5, 9, 20, 31], list(range(40, 70))]
    one = serve(tmp_path, runner="eager")
    two = serve(tmp_path, runner="eager", build=build_ranks(2))

    for vector, expected in zip(two.embed(prompts), one.embed(prompts), strict=True):
        assert np.abs(vector - expected).max() < CLOSE
    two.close()


@pytest.mark.parametrize("quantization", ["w8a8", "w4a8"])
def test_quantised_weights_are_divided(quantization, tmp_path):
    """Rows that are multiplied are rounded by each rank for itself."""
    shape = SHAPE | {"intermediate_size": 128, "head_dim": 32}
    write(transformers.LlamaConfig(**shape), 5, tmp_path)
    options = {"quantization": quantization}
    one = Serving(tmp_path, options=options)
    two = Serving(tmp_path, build=build_ranks(2), options=options)

    (_, rows), (_, found) = answers(one, new=1), answers(two, new=1)
    two.close()

    assert np.abs(found - rows).max() < 0.2


@pytest.mark.parametrize("sizes", [(3, "num_attention_heads"), (8, "num_attention_heads")])
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(sizes, tmp_path):
    size, what = sizes
    write(transformers.LlamaConfig(**SHAPE), 5, tmp_path)

    with pytest.raises(ConfigError, match=rf"parallel\.tp={size}: {what}.* divides by 1, 2, 4$"):
        Serving(tmp_path, build=build_ranks(size))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_dense_blocks_among_experts_may_have_fewer_ranks(size, tmp_path):
    write(NATIVE["deepseek-v3"](), 11, tmp_path)
    dense = {2: [(SingleRank(),), (SingleRank(),)], 4: [thread_ranks(2), thread_ranks(2)]}[size]
    places = [place for group in dense for place in group]
    build = build_ranks(size, mesh_of=lambda rank: Mesh(rank, dense=places[rank.rank]))
    one, several = Serving(tmp_path), Serving(tmp_path, build=build)
    (tokens, rows), (found, found_rows) = answers(one), answers(several)
    several.close()

    assert found == tokens
    assert np.abs(found_rows - rows).max() < CLOSE
    assert several.executor.lost == []


def test_a_size_for_dense_blocks_is_refused_without_experts(tmp_path):
    write(transformers.LlamaConfig(**SHAPE), 5, tmp_path)
    build = build_ranks(2, mesh_of=lambda rank: Mesh(rank, dense=SingleRank()))

    with pytest.raises(ConfigError, match=r"^parallel\.moe_dense_tp=1: Llama\w+ has no experts"):
        Serving(tmp_path, build=build)


def test_each_rank_keeps_its_share_of_weights_and_pages(tmp_path):
    write(transformers.LlamaConfig(**SHAPE), 5, tmp_path)
    bytes_of = {}
    for size in (1, 2, 4):
        serving = Serving(tmp_path, build=build_ranks(size))
        bytes_of[size] = serving.facts.kv_bytes
        serving.close()

    assert bytes_of[2] == bytes_of[1] // 2
    assert bytes_of[4] == bytes_of[2]  # there are two heads of keys


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    write(transformers.Qwen2Config(**SHAPE), 5, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"chunk_tokens": 16, "max_batch_tokens": 19},
        {"pages": 8, "conservativeness": 0.1, "preempt_every": 5},
        {"page_size": 4, "pages": 400},
    ],
    ids=["chunked", "preempted", "small pages"],
)
def test_steps_of_all_kinds_are_followed(model_dir, given):
    prompts = [[5, 9, 20, 31], [7] * 37, list(range(40, 110)), [5, 9, 20, 31, 8]]
    one, two = Serving(model_dir, **given), Serving(model_dir, build=build_ranks(2), **given)
    for _ in range(2):  # the second time from the cache
        expected = one.generate(prompts, max_new_tokens=12)
        assert two.generate(prompts, max_new_tokens=12) == expected
    sampled = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.4, "max_new_tokens": 12}
    assert two.generate(prompts, **sampled) == one.generate(prompts, **sampled)
    rids = [s.add(prompts[2], logprobs=LogprobOptions(start=1, top=2)) for s in (one, two)]
    for serving in (one, two):
        serving.run()
    found = [s.outputs[rid][0].prompt_logprobs for s, rid in zip((one, two), rids, strict=True)]
    assert np.allclose(found[0].logprobs, found[1].logprobs, atol=CLOSE, equal_nan=True)
    two.close()
    assert two.executor.lost == []


def test_steps_that_are_launched_ahead_are_followed(model_dir):
    prompts = [[5, 9, 20, 31], [7] * 37, list(range(40, 110)), [5, 9, 20, 31, 8]]
    given = {"max_batch_tokens": 40, "chunk_tokens": 24}
    two = Serving(model_dir, build=build_ranks(2), overlap=True, **given)
    one = Serving(model_dir, **given)
    for _ in range(2):  # the second time from the cache
        expected = one.generate(prompts, max_new_tokens=12)
        assert two.generate(prompts, max_new_tokens=12) == expected
    sampled = {"temperature": 0.8, "frequency_penalty": 0.4, "max_new_tokens": 12}
    assert two.generate(prompts, **sampled) == one.generate(prompts, **sampled)
    two.add([7] * 30, max_new_tokens=40)
    two.scheduler.step()
    two.close()  # with steps in flight
    assert two.executor.lost == []


def test_a_request_that_is_aborted_leaves_the_others_alone(model_dir):
    expected = Serving(model_dir).generate([[5, 9, 20, 31]], max_new_tokens=40)
    two = Serving(model_dir, build=build_ranks(2))
    rids = [two.add(prompt, max_new_tokens=40) for prompt in ([5, 9, 20, 31], [7] * 30)]
    for _ in range(10):
        two.scheduler.step()
    two.scheduler.abort(rids[1], Finish(type="abort", message="enough"))
    two.run()
    two.close()

    assert [two.tokens[rids[0]]] == expected
    assert two.finish[rids[1]].type == "abort"


def test_grammars_reach_every_rank(tmp_path):
    path = write_random_model(tmp_path, context_len=256)
    vocab_size = load_config(path).vocab_size
    grammars = [build_byte_grammar(vocab_size) for _ in range(2)]
    left = list(grammars)

    def build(path, options, mesh):
        grammar = left.pop()
        parts = ExecutorParts((*STANDARD_WORKERS, lambda context: grammar.worker))
        return build_executor(path, options, parts=parts, mesh=mesh)

    control = grammars[0].control
    two = Serving(path, build=build_ranks(2, build), capabilities=(control,))
    asked = {"regex": "(ab|cd){4}", "max_new_tokens": 20, "eos_ids": (END,)}
    rids = [two.add(prompt, **asked) for prompt in ([5, 9, 200, 31], [7] * 37)]
    end = time.monotonic() + 60
    while not all(rid in two.finish for rid in rids):  # grammars are compiled elsewhere
        assert time.monotonic() < end
        if not two.scheduler.step():
            time.sleep(0.005)
    two.close()
    for grammar in grammars:
        grammar.close()

    for rid in rids:
        text = bytes(t for t in two.tokens[rid] if t != END).decode()
        assert re.fullmatch("(ab|cd){4}", text)


class FailingWorker(CapabilityWorker):
    """Fails the forward pass of some steps."""

    name = "prompt_logprobs"

    def __init__(self, fails: set[int]) -> None:
        self._fails, self._count = fails, 0

    def before_forward(self, step, work) -> None:
        self._count += 1
        if self._count in self._fails:
            raise ValueError("told to fail")


def failing(fails_by_rank, path, options, mesh):
    parts = ExecutorParts((lambda context: FailingWorker(fails_by_rank[mesh.tp.rank]),))
    return build_executor(path, options, parts=parts, mesh=mesh)


@pytest.mark.parametrize(("overlap", "queued"), [(False, 0), (True, 0), (True, 1)])
def test_a_step_that_fails_on_all_ranks_fails_its_requests_only(model_dir, overlap, queued):
    build = build_ranks(2, partial(failing, [{1}, {1}]), queued=queued)
    two = Serving(model_dir, build=build, overlap=overlap)
    doomed = two.add([5] * 9, logprobs=LogprobOptions(start=1))
    two.run()

    assert two.finish[doomed].type == "abort"
    assert "told to fail" in two.finish[doomed].message
    expected = Serving(model_dir).generate([[5, 9, 20, 31]])
    assert two.generate([[5, 9, 20, 31]]) == expected
    two.close()
    assert two.executor.lost == []


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_on_one_rank_ends_the_group(model_dir, rank):
    fails = [{1} if rank == r else set() for r in range(2)]
    build = build_ranks(2, partial(failing, fails), timeout_s=1.0)
    two = Serving(model_dir, build=build)
    two.add([5] * 9, logprobs=LogprobOptions(start=1))

    with pytest.raises(RankLostError):
        two.run()
    two.close()


def slow(path, options, mesh, rank=1, stage=0):
    """The executor of a rank; one of them begins each step late."""
    executor, facts = build_standard(path, options, mesh=mesh)
    launch = executor.launch

    def late(plan):
        time.sleep(0.01)
        return launch(plan)

    if (mesh.tp.rank, mesh.stage.number) == (rank, stage):
        executor.launch = late
    return executor, facts


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_that_is_slow_holds_the_others_up_and_changes_nothing(model_dir, overlap):
    prompts = [[5, 9, 20, 31], [7] * 37]
    two = Serving(model_dir, build=build_ranks(2, slow), overlap=overlap)
    assert two.generate(prompts) == Serving(model_dir).generate(prompts)
    two.close()
    assert two.executor.lost == []


def test_what_only_one_rank_can_tell_is_refused(model_dir):
    from sylvan.protocol.commands import DescribeMemory

    two = Serving(model_dir, build=build_ranks(2))
    result = two.executor.control(DescribeMemory()).wait()
    assert "several ranks share the model" in result.error
    assert two.generate([[5, 9, 20, 31]]) == Serving(model_dir).generate([[5, 9, 20, 31]])
    two.close()


def test_weights_are_replaced_on_every_rank(model_dir, tmp_path):
    from sylvan.protocol.commands import DiskTensors, UpdateWeights

    write(transformers.Qwen2Config(**SHAPE), 11, tmp_path)
    two = Serving(model_dir, build=build_ranks(2))
    before = two.generate([[5, 9, 20, 31]])
    source = DiskTensors(str(tmp_path), "auto")

    result = two.executor.control(UpdateWeights(source=source)).wait()
    assert result.error == ""
    two.scheduler.flush_cache()

    after = two.generate([[5, 9, 20, 31]])
    assert after == Serving(tmp_path).generate([[5, 9, 20, 31]]) != before
    missing = DiskTensors(str(tmp_path / "nowhere"), "auto")
    assert two.executor.control(UpdateWeights(source=missing)).wait().error
    assert two.generate([[5, 9, 20, 31]]) == after
    two.close()
    assert two.executor.lost == []


def test_tensors_in_shared_memory_reach_every_rank(model_dir, tmp_path):
    from sylvan.protocol.commands import HashWeights, SharedTensors, UpdateWeights

    write(transformers.Qwen2Config(**SHAPE), 11, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    memory = SharedMemory(create=True, size=len(data))
    memory.buf[: len(data)] = data
    two = Serving(model_dir, build=build_ranks(2))

    def done(command):
        result = two.executor.control(command).wait()
        assert result.error == ""
        return result.body

    before = done(HashWeights())["checksums"]
    try:
        done(UpdateWeights(source=SharedTensors(memory.name, len(data))))
        short = SharedTensors(memory.name, len(data) - 100)
        refused = two.executor.control(UpdateWeights(source=short)).wait()
    finally:
        memory.close()
        memory.unlink()

    assert "cut off" in refused.error
    after, fresh = done(HashWeights())["checksums"], Serving(tmp_path, build=build_ranks(2))
    assert after == fresh.executor.control(HashWeights()).wait().body["checksums"]
    assert before.keys() == after.keys()
    assert before != after
    assert two.generate([[5, 9, 20, 31]]) == fresh.generate([[5, 9, 20, 31]])
    for serving in (two, fresh):
        serving.close()
    assert two.executor.lost == []


def on_device(path, options, mesh):
    """A rank with a device of its own, whose steps are queued; it is the CPU here."""
    platform = open_host(load_kinds()["cpu"].facts)
    options = replace(options, attention="dense", num_pages=options.num_pages - mesh.tp.rank)
    parts = ExecutorParts(STANDARD_WORKERS)
    return build_executor(path, options, parts=parts, platform=platform, mesh=mesh)


@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_with_a_device_each_answer_as_one(model_dir, overlap):
    prompts = [[5, 9, 20, 31], [7] * 37, list(range(40, 110)), [5, 9, 20, 31, 8]]
    one = Serving(model_dir, pages=60)
    two = Serving(model_dir, build=build_ranks(2, on_device, queued=1), overlap=overlap, pages=60)
    assert two.cache.total_tokens == one.cache.total_tokens - 16  # what the other rank has room for
    for _ in range(2):  # the second time from the cache
        assert two.generate(prompts) == one.generate(prompts)
    sampled = {"temperature": 0.8, "frequency_penalty": 0.4, "max_new_tokens": 12}
    assert two.generate(prompts, **sampled) == one.generate(prompts, **sampled)
    two.close()
    assert two.executor.lost == []
