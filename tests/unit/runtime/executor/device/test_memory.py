from __future__ import annotations

import pytest
import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.device.memory import GRAPH_BYTES, DeviceUsage, plan_pages
from sylvan.runtime.executor.graph_buckets import GraphBucket, decode_buckets, mixed_buckets
from sylvan.runtime.executor.graphs.buckets import BucketRunner
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.executor.runner import EagerRunner
from tests.support.delayed import DelayedPlatform
from tests.support.random_model import VOCAB, write_random_model

MIB = 1 << 20
PAGE_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # of the random model: sides, layers, tokens, heads, columns


def measured(**changes) -> DeviceUsage:
    parts = {"total": 1000, "free": 1000, "weights": 300, "activations": 100, "graphs": 50}
    return DeviceUsage(**parts | changes)


def test_auto_takes_what_is_left_of_the_budget():
    report = plan_pages(measured(), page_bytes=10, wanted=None, least=3)

    assert report.num_pages == (900 - 450) // 10
    assert "KV cache 450 B" in report.describe()


def test_pages_asked_for_are_made_or_refused_with_the_numbers():
    assert plan_pages(measured(), 10, wanted=45, least=3).num_pages == 45
    with pytest.raises(ConfigError, match=r"weights 300 B \+ activations 100 B .* 10 B missing"):
        plan_pages(measured(), 10, wanted=46, least=3)


def test_too_little_for_anything_is_refused():
    with pytest.raises(
        ConfigError, match=r"too little memory on the device: .*lower cache\.memory"
    ):
        plan_pages(measured(free=500), 10, wanted=None, least=3)


def test_buckets_grow_to_the_largest_batch():
    def sizes(most: int) -> list[int]:
        buckets = decode_buckets(most)
        assert all(bucket.decodes for bucket in buckets)
        return [bucket.rows for bucket in buckets]

    assert sizes(1) == [1]
    assert sizes(6) == [1, 2, 4, 6]
    assert sizes(32) == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32]
    assert sizes(1000)[-1] == 256
    assert len(sizes(256)) < 30


def test_buckets_of_prompts_have_more_rows_than_requests():
    assert mixed_buckets(16, 8) == ()
    assert mixed_buckets(64, 2) == (GraphBucket(32, 2), GraphBucket(64, 2))
    assert mixed_buckets(100, 64)[:4] == (
        GraphBucket(32, 8),
        GraphBucket(64, 8),
        GraphBucket(96, 8),
        GraphBucket(96, 64),
    )
    assert max(mixed_buckets(8192, 256)) == GraphBucket(2048, 256)
    assert not [bucket for bucket in mixed_buckets(8192, 256) if bucket.decodes]


@pytest.mark.parametrize(
    ("tokens", "requests", "bucket"),
    [
        (3, 3, GraphBucket(4, 4)),
        (9, 9, None),
        (5, 3, GraphBucket(32, 8)),
        (33, 8, GraphBucket(64, 8)),
        (33, 9, GraphBucket(128, 64)),
        (129, 1, None),
    ],
)
def test_a_step_gets_the_least_graph_that_holds_it(tokens, requests, bucket):
    buckets = [
        GraphBucket(1, 1),
        GraphBucket(4, 4),
        GraphBucket(8, 8),
        GraphBucket(32, 8),
        GraphBucket(64, 8),
    ]
    runner = BucketRunner(EagerRunner(None, None), [*buckets, GraphBucket(128, 64)])

    assert runner.bucket(tokens, requests) == bucket


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=64)


def options(**changes) -> LocalOptions:
    sizes = {"page_size": 16, "num_pages": 9, "max_batch_tokens": 32, "max_running_reqs": 2}
    return LocalOptions(**sizes | {"attention": "dense"} | changes)


def test_the_cache_fills_what_measuring_leaves(model_dir):
    platform = DelayedPlatform(memory_bytes=100 * MIB)
    platform.peaks = [30 * MIB, 7 * MIB]  # the largest step, then the largest graph's

    _, facts = build_executor(model_dir, options(fill=True), platform=platform)

    count = len(decode_buckets(2)) + len(mixed_buckets(32, 2))
    graphs = 7 * MIB + 2 * VOCAB * 4 + count * GRAPH_BYTES
    assert facts.num_pages == (90 * MIB - 30 * MIB - graphs) // PAGE_BYTES
    assert facts.runner == "graph"


def test_a_cache_that_does_not_fit_is_refused(model_dir):
    platform = DelayedPlatform(memory_bytes=10 * MIB)

    with pytest.raises(ConfigError, match=r"KV cache .* missing"):
        build_executor(model_dir, options(num_pages=4096, runner="eager"), platform=platform)


def test_memory_that_ends_while_loading_is_one_sentence(model_dir):
    platform = DelayedPlatform()

    def exhausted(work):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    platform.peak = exhausted

    with pytest.raises(ConfigError, match=r"too little memory on cpu .* 2\.00 GiB\. Lower") as seen:
        build_executor(model_dir, options(), platform=platform)
    assert "\n" not in str(seen.value)


def test_a_cache_of_numbers_that_the_chip_has_not_is_refused(model_dir):
    with pytest.raises(
        ConfigError, match=r"cache\.dtype=fp8_e4m3: delayed \(late1\) does not compute with such"
    ):
        build_executor(
            model_dir, options(kv_dtype="fp8_e4m3"), platform=DelayedPlatform(chip="late1")
        )


def test_graphs_that_cannot_be_had_are_refused(model_dir):
    with pytest.raises(ConfigError, match="attention=torch captures no graphs"):
        build_executor(
            model_dir, options(attention="torch", runner="graph"), platform=DelayedPlatform()
        )
