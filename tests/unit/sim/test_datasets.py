"""Workloads have the lengths, sharing and times of load tests."""

from __future__ import annotations

import json
from importlib.resources import files

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.bench import datasets as bench_datasets
from sylvan.bench.load import BenchRun
from sylvan.bench.simulated import asked, settings_of, tokenizer_of
from sylvan.config.bench import DataConfig, LoadConfig
from sylvan.config.simulate import ArrivalConfig
from sylvan.protocol.errors import ConfigError
from sylvan.sim.datasets import arranged, drawn
from sylvan.sim.measured import MeasuredRequest
from sylvan.sim.workload import PromptBlock, SimulatedPrompts
from sylvan.sim.workload import drawn as ids_of
from sylvan.text.tokenizer import Tokenizer

SAPLING = str(files("sylvan") / "assets" / "sapling")


def prompts(work):
    made = SimulatedPrompts()
    return [[made.ids(turn.parts) for turn in each.turns] for each in work.conversations]


def test_random_prompts_are_as_long_as_asked_for_and_share_nothing():
    config = DataConfig(requests=50, input_tokens=80, output_tokens=20, range_ratio=0.5)
    work = arranged(drawn(config), ArrivalConfig(), 1)
    lengths = [len(ids) for [ids] in prompts(work)]
    outputs = [each.turns[0].output_tokens for each in work.conversations]

    assert len(work.conversations) == 50
    assert 40 <= min(lengths) < max(lengths) <= 80
    assert 10 <= min(outputs) < max(outputs) <= 20
    assert len({ids[:10].tobytes() for [ids] in prompts(work)}) == 50


def test_turns_count_as_requests():
    work = arranged(drawn(DataConfig(requests=7, turns=3)), ArrivalConfig(), 1)

    assert [len(each.turns) for each in work.conversations] == [3, 3, 1]
    assert work.num_requests == 7


def test_groups_share_their_system_prompt():
    config = DataConfig(
        dataset="shared-prefix", groups=5, prompts_per_group=4, system_tokens=100,
        question_tokens=10, range_ratio=1.0,
    )  # fmt: skip
    found = [ids for [ids] in prompts(arranged(drawn(config), ArrivalConfig(), 1))]
    starts = [ids[:100].tobytes() for ids in found]

    assert [len(ids) for ids in found] == [110] * 20
    assert sorted(starts.count(start) for start in set(starts)) == [4] * 5
    assert len({ids.tobytes() for ids in found}) == 20


def trace(path, *lines):
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return DataConfig(dataset="trace", path=str(path))


def test_a_trace_has_its_times_lengths_and_shared_blocks(tmp_path):
    config = trace(
        tmp_path / "t.jsonl",
        {"timestamp": 4000, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 4500, "input_length": 1100, "output_length": 6, "hash_ids": [7, 8, 10]},
        {"timestamp": 7000, "input_length": 600, "output_length": 7, "hash_ids": [7, 11]},
    )
    work = arranged(drawn(config), ArrivalConfig(timestamps=True, slowdown=2.0), 1)
    [a], [b], [c] = prompts(work)

    assert [each.due_s for each in work.conversations] == [0.0, 1.0, 6.0]
    assert [len(ids) for ids in (a, b, c)] == [1200, 1100, 600]
    assert np.array_equal(a[:1024], b[:1024])
    assert np.array_equal(a[:512], c[:512])
    assert not np.array_equal(a[1024:1100], b[1024:])
    assert [each.turns[0].output_tokens for each in work.conversations] == [5, 6, 7]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"input_length": 0, "output_length": 1}, r"line 1: .*>= 1.*input_length"),
        ({"input_length": 1, "output_length": 1 << 30}, r"<= 16777216.*output_length"),
        ({"input_length": 1, "output_length": 1, "timestamp": -1}, r">= 0.*timestamp"),
        ({"output_length": 1}, "input_length"),
        ([], "line 1"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        drawn(trace(tmp_path / "t.jsonl", line))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(dataset="trace"), "needs data.path"),
        (DataConfig(path="x"), "takes no data.path"),
        (DataConfig(dataset="sharegpt", path="x"), "needs sim.tokenizer"),
        (
            DataConfig(requests=10_000_001),
            "data.requests: 10000001 requests; the limit is 10000000",
        ),
        (DataConfig(groups=10_000, prompts_per_group=1_001), "data.groups x data.prompts_per"),
        (DataConfig(suffix="x"), "data.suffix needs sim.tokenizer"),
        (DataConfig(dataset="trace", path="/none/t"), "cannot read /none/t"),
    ],
)
def test_a_wrong_data_set_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        drawn(config)


async def test_arrivals_are_those_of_a_load_test_of_the_same_seed():
    config = LoadConfig(rate=1000.0, burstiness=0.5)
    load = BenchRun(Still(), config, seed=5)
    work = bench_datasets.load(DataConfig(requests=30, input_tokens=4), Tokenizer.load(SAPLING))
    wanted = [due_s async for _, due_s in load._arrivals(work, 0.0)]

    turns = drawn(DataConfig(requests=30, input_tokens=4))
    found = arranged(turns, ArrivalConfig(rate=1000.0, burstiness=0.5), 5)

    assert [each.due_s for each in found.conversations] == wanted


class Still:
    def clock(self) -> float:
        return 1e9  # everything is due


def test_with_a_tokenizer_prompts_are_those_of_a_load_test():
    config = DataConfig(requests=5, input_tokens=30)
    bench = bench_datasets.load(config, Tokenizer.load(SAPLING))
    found = prompts(arranged(asked(config, SAPLING), ArrivalConfig(), 1))

    assert [ids.tolist() for [ids] in found] == [list(c.turns[0].token_ids) for c in bench]


def test_chats_are_refused(tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))

    with pytest.raises(ConfigError, match="chats cannot be simulated"):
        asked(DataConfig(dataset="custom", path=str(file)), SAPLING)


def measured(**kwargs) -> MeasuredRequest:
    empty = dict.fromkeys(MeasuredRequest.__struct_fields__[:6], ())
    return msgspec.convert({**empty, **kwargs}, MeasuredRequest)


def test_a_load_test_tells_its_data_and_load():
    found = measured(
        config={"data": {"requests": 9, "seed": 3}, "load": {"warmup": 2, "sweep": ["1/s", "2/s"]}},
        figures={"request_rate": 2.0, "server_info": {"model_path": SAPLING}},
    )
    data, load = settings_of(found, "f")

    assert (data.requests, data.seed, load.rate, load.warmup, load.sweep) == (9, 3, 2.0, 2, ())
    assert tokenizer_of(found, None, "f") == SAPLING
    with pytest.raises(ConfigError, match=r"--tokenizer DIR.*none that is on this machine"):
        tokenizer_of(measured(), None, "f")
    with pytest.raises(ConfigError, match=r"target\.api chat"):
        settings_of(measured(config={"target": {"api": "chat"}}), "f")
    with pytest.raises(ConfigError, match="requests"):
        settings_of(measured(config={"data": {"requests": 0}}), "f")


@given(seed=st.lists(st.integers(0, 2**63), min_size=1, max_size=4), lengths=st.tuples(
    st.integers(0, 300), st.integers(0, 300)))  # fmt: skip
def test_a_longer_block_of_the_same_seed_begins_the_same(seed, lengths):
    short, long = (ids_of(PromptBlock(tuple(seed), length)) for length in sorted(lengths))

    assert np.array_equal(long[: len(short)], short)
    assert long.dtype == np.int32
    assert not len(long) or (long.min() >= 2 and long.max() < 1 << 15)
    other = ids_of(PromptBlock((*seed, 1), 300))
    assert (other[: len(long)] == long).mean() < 0.2 if len(long) > 50 else True
