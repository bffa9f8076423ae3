"""Experts that groups of ranks have: the answers of one rank, wherever they are.

All ranks are threads of this process; `tests/integration/test_rank_experts.py` has processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from sylvan.protocol.commands import (
    BalanceExperts,
    DiskTensors,
    HashWeights,
    ReadWeights,
    UpdateWeights,
)
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.layers.mesh import Mesh
from sylvan.runtime.layers.placement import ExpertPlacement
from tests.parity.checkpoints import write
from tests.parity.serving import Serving, build_standard
from tests.parity.test_ranks import CLOSE, NATIVE, answers, slow
from tests.support.ranks import build_ranks
from tests.support.updates import as_bytes, carry_out, weights_in

MIXTURES = ("mixtral", "gpt-oss", "deepseek-v3")
"""Experts one by one, as stacks with biases, and beside shared ones."""
OTHERS = (
    *("qwen2-moe", "qwen3-moe", "jamba", "granitemoe", "llama4", "lfm2-moe", "olmoe"),
    "jetmoe",
)
LOADS = {layer: [90, 3, 1, 40, 2, 80, 1, 1] for layer in range(6)}


def served(
    path: Path,
    size: int,
    ep: int,
    copies: int = 0,
    *,
    busy: bool = False,
    a2a: bool = False,
    build=build_standard,
) -> Serving:
    def mesh_of(rank):
        placement = ExpertPlacement(ep, copies)
        if busy:
            placement.balance(LOADS)
        return Mesh(rank, ep, placement, all_to_all=a2a)

    return Serving(path, build=build_ranks(size, build, mesh_of=mesh_of))


def checked(path: Path, ways: Sequence[Serving]) -> None:
    """The answers of each are those of one rank; bits are for step programs to keep."""
    one = Serving(path)
    tokens, rows = answers(one)
    for serving in ways:
        theirs, found_rows = answers(serving)
        serving.close()
        assert serving.executor.lost == []
        assert theirs == tokens
        assert np.abs(found_rows - rows).max() < CLOSE


@pytest.mark.parametrize("family", MIXTURES)
def test_whole_experts_are_divided_among_ranks(family, tmp_path):
    write(NATIVE[family](), len(family), tmp_path)
    ways = [served(tmp_path, 2, 2), served(tmp_path, 2, 2, 2, busy=True)]
    if family == "mixtral":
        ways.append(served(tmp_path, 4, 2, 2))

    checked(tmp_path, ways)


@pytest.mark.parametrize("family", [pytest.param("gpt-oss", marks=pytest.mark.slow), "mixtral"])
def test_outputs_of_experts_go_where_they_are_added_up(family, tmp_path):
    write(NATIVE[family](), len(family), tmp_path)
    gathered = served(tmp_path, 4, 4, 4, busy=True)
    exchanged = served(tmp_path, 4, 4, 4, busy=True, a2a=True)
    (tokens, rows), (found, found_rows) = answers(gathered), answers(exchanged)
    for serving in (gathered, exchanged):
        serving.close()
        assert serving.executor.lost == []

    assert found == tokens
    assert np.array_equal(found_rows, rows), "each sum has the same order"


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_whole_experts_of_every_other_family_are_divided(family, tmp_path):
    config = NATIVE[family]()
    write(config, len(family), tmp_path)
    checked(tmp_path, [served(tmp_path, 2, 2)])


def test_experts_that_return_their_input_are_everywhere(tmp_path):
    config = NATIVE["longcat-flash"]()
    config.n_routed_experts = 8
    write(config, 3, tmp_path)
    ways = [served(tmp_path, 2, 2), served(tmp_path, 4, 2, 2, busy=True)]
    checked(tmp_path, [*ways, served(tmp_path, 2, 2, 2, a2a=True)])

    serving = served(tmp_path, 2, 2, 2)
    tokens, _ = answers(serving)
    assert all(load.sum() > 0 for load in serving.facts.expert_load.values())
    [found] = carry_out(serving, BalanceExperts())
    assert not found.error
    assert found.body["moved"] > 0
    serving.scheduler.flush_cache()
    assert answers(serving)[0] == tokens
    serving.close()
    assert serving.executor.lost == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mixtral")
    write(NATIVE["mixtral"](), 5, path)
    return path


def test_a_rank_that_is_slow_holds_the_one_with_other_experts_up_and_changes_nothing(folder):
    prompts = [[5, 9, 20, 31], [7] * 37]
    late, prompt = served(folder, 2, 2, build=slow), served(folder, 2, 2)
    assert late.generate(prompts) == prompt.generate(prompts)
    for serving in (late, prompt):
        serving.close()
        assert serving.executor.lost == []


def test_each_rank_has_its_experts_only(folder):
    whole, half = Serving(folder), served(folder, 2, 2)
    try:
        bytes_of = [s.facts.weight_bytes for s in (whole, half)]
        assert bytes_of[0] == bytes_of[1]  # of the checkpoint, whoever has it
        loads = [s.facts.expert_load for s in (whole, half)]
        assert loads[0].keys() == loads[1].keys()
    finally:
        half.close()


@pytest.mark.slow
def test_tensors_of_experts_are_read_hashed_and_replaced_wherever_they_are(folder, tmp_path):
    write(NATIVE["mixtral"](), 11, tmp_path)
    serving, fresh = served(folder, 2, 2), served(tmp_path, 2, 2)
    old, new = weights_in(folder), weights_in(tmp_path)
    names = [name for name in old if ".experts." in name]
    for name in (names[0], names[-1]):
        [found] = carry_out(serving, ReadWeights(name, most=200))
        assert not found.error
        assert torch.equal(torch.tensor(found.body["values"]), old[name].float()[:200])
    one = names[-1]  # which the second rank alone has
    [partly] = carry_out(serving, UpdateWeights(as_bytes({one: new[one]})))
    assert not partly.error
    [found] = carry_out(serving, ReadWeights(one, most=200))
    assert torch.equal(torch.tensor(found.body["values"]), new[one].float()[:200])
    [wrong] = carry_out(serving, UpdateWeights(as_bytes({one: new[one][:, :-1].contiguous()})))
    assert "has shape" in wrong.error

    [updated] = carry_out(serving, UpdateWeights(DiskTensors(str(tmp_path))))

    assert not updated.error
    sums = [carry_out(s, HashWeights())[0].body["checksums"] for s in (serving, fresh)]
    assert sums[0] == sums[1]
    assert {*sums[0]} >= {name.removeprefix("model.") for name in names}
    prompts = [[5, 9, 20, 31], [7] * 29]
    assert serving.generate(prompts) == fresh.generate(prompts)
    for each in (serving, fresh):
        each.close()
        assert each.executor.lost == []


def test_experts_are_moved_while_they_are_served(folder):
    serving = served(folder, 2, 2, 2)
    tokens, rows = answers(serving)
    serving.scheduler.flush_cache()

    [found] = carry_out(serving, BalanceExperts())

    assert not found.error
    assert found.body["moved"] > 0
    assert found.body["before"] < found.body["after"] <= 1
    again, same = answers(serving)
    assert again == tokens
    assert np.abs(same - rows).max() < CLOSE
    for name, tensor in weights_in(folder).items():
        [read] = carry_out(serving, ReadWeights(name, most=300))
        assert torch.equal(torch.tensor(read.body["values"]), tensor.float()[:300]), name
    serving.close()
    assert serving.executor.lost == []


def test_experts_stay_where_they_are_without_a_checkpoint_or_groups(folder):
    serving, whole = served(folder, 2, 2), served(folder, 2, 1)
    serving.generate([[5, 9, 20, 31]])
    new = {name: value * 0.5 for name, value in weights_in(folder).items()}
    carry_out(serving, UpdateWeights(as_bytes(new), partial=False))
    results = [carry_out(s, BalanceExperts())[0] for s in (serving, whole)]
    assert "do not come from a checkpoint" in results[0].error
    assert "not divided among ranks" in results[1].error
    for each in (serving, whole):
        each.close()
        assert each.executor.lost == []


def test_what_cannot_be_divided_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"parallel\.ep=4: .* divide into parallel\.ep=4|divide"):
        served(folder, 2, 4)
    write(NATIVE["llama"](), 5, tmp_path)
    with pytest.raises(ConfigError, match=r"^parallel\.ep=2: LlamaForCausalLM has no experts"):
        served(tmp_path, 2, 2)
    with pytest.raises(ConfigError, match=r"^parallel\.ep=2: 8 experts and 1 copies do not divide"):
        served(folder, 2, 2, 1)
