"""`parallel.same_bits`: answers keep their bits on any number of processes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from sylvan import Engine
from sylvan.config import Config
from sylvan.config.tree import ParallelConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.ranks import with_same_bits
from sylvan.runtime.executor.division import check_division
from sylvan.runtime.layers.mesh import Mesh, UnconnectedRank
from sylvan.runtime.models.registry import load_config
from tests.parity.checkpoints import SHAPE, write
from tests.parity.families import FAMILIES

WIDE = SHAPE | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
PROMPTS = [[5, 9, 20, 31], [7] * 29]
PARAMS = {"temperature": 0.8, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3}


def answers(model: Path, tp: int, dtype: str = "float32", **more: object) -> list[Any]:
    """Ids, and log probabilities to the last bit."""
    flags = {"device": "cpu", "threads": 1, "max_total_tokens": 4096, "dtype": dtype}
    processes = {"processes": "many"} if tp > 1 else {}
    given: dict[str, Any] = {**flags, **processes, **more}
    with Engine(model_path=str(model), tp_size=tp, **given) as engine:
        replies = engine.generate(input_ids=PROMPTS, sampling_params=PARAMS, return_logprob=True)
    return [
        (r["output_ids"], [entry[0] for entry in r["meta_info"]["output_token_logprobs"]])
        for r in replies
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    write(transformers.LlamaConfig(**WIDE), 5, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "sizes"), [("float32", (2,)), ("bfloat16", (2, 4))])
def test_bits_do_not_depend_on_the_number_of_ranks(
    model: Path, dtype: str, sizes: tuple[int, ...]
) -> None:
    expected = answers(model, 1, dtype)
    for size in sizes:
        assert answers(model, size, dtype) == expected, size


@pytest.mark.parametrize(
    "more",
    [{"enable_lora": True}, pytest.param({"processes": "many"}, marks=pytest.mark.slow)],
)
def test_nor_on_how_one_rank_is_started(model: Path, more: dict[str, object]) -> None:
    assert answers(model, 1, **more) == answers(model, 1)
    assert answers(model, 1, parallel__same_bits=False) != answers(model, 1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: transformers.LlamaConfig(**WIDE), ""),
        (lambda: transformers.LlamaConfig(**SHAPE), r"input features \(112\) are summed in 1"),
        (FAMILIES["olmo2"], "norms over whole projections"),
        (FAMILIES["mixtral"], r"set parallel\.ep=2"),
    ],
)
def test_models_that_cannot_be_alike_are_served_and_say_so(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], Any],
    why: str,
) -> None:
    write(make(), 5, tmp_path)
    given = Config(model=str(tmp_path), parallel=ParallelConfig(tp=2))

    with caplog.at_level(logging.INFO):
        found = with_same_bits(given)

    assert found.parallel.same_bits is (not why)
    assert re.search(f"parallel.same_bits=false: .*{why}", caplog.text) if why else not caplog.text


@pytest.mark.slow
def test_nor_on_who_has_which_experts(tmp_path: Path) -> None:
    config = FAMILIES["mixtral"]()
    config.update({"hidden_size": 128, "head_dim": 32, "intermediate_size": 128})
    write(config, 5, tmp_path)
    assert answers(tmp_path, 2, ep_size=2) == answers(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"parallel\.same_bits: .* set parallel\.ep=2"):
        answers(tmp_path, 2, parallel__same_bits=True)


@pytest.mark.parametrize(
    ("size", "ep", "changes", "why"),
    [
        (2, 1, {}, r"input features \(112\) are summed in 1 parts of a multiple of 32"),
        (4, 1, {"intermediate_size": 64}, r"\(64\) are summed in 2 parts .* by 4 ranks"),
    ],
)
def test_sums_that_cannot_be_alike_are_refused(
    tmp_path: Path, size: int, ep: int, changes: dict[str, int], why: str
) -> None:
    write(transformers.LlamaConfig(**SHAPE | changes), 5, tmp_path)
    mesh = Mesh(UnconnectedRank(size), ep, same_bits=True)
    with pytest.raises(ConfigError, match=rf"^parallel\.same_bits: .*{why}"):
        check_division(load_config(tmp_path), mesh)


def test_parts_of_experts_and_norms_over_ranks_are_refused(tmp_path: Path) -> None:
    for name, why in (("mixtral", r"set parallel\.ep=2"), ("olmo2", "norms over whole")):
        write(FAMILIES[name](), 5, tmp_path / name)
        mesh = Mesh(UnconnectedRank(2), same_bits=True)
        with pytest.raises(ConfigError, match=rf"^parallel\.same_bits: .*{why}"):
            check_division(load_config(tmp_path / name), mesh)
