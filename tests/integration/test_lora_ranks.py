"""Adapters of a model that two processes hold, in step programs over shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from sylvan import Engine
from tests.parity.checkpoints import write
from tests.parity.families import FAMILIES
from tests.support.adapters import write_random_adapter
from tests.support.random_model import write_random_model

NAMES = ("first", "second", "third")
PROMPTS = [[5, 9, 190, 31], [7] * 40, list(range(30, 90))]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("base"), context_len=512)


@pytest.fixture(scope="module")
def folders(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_random_adapter(folder / name, model_dir, seed)
        for seed, name in enumerate(NAMES)
    }


def answers(
    model_dir: Path, folders: dict[str, Path], tp: int, ep: int = 1, groups: int = 1
) -> list[list[list[int]]]:
    """Of the base model and each adapter, together, twice; the third is loaded while serving.

    Two have a place in host memory, so that copies are read again on every rank.
    """
    paths = {name: str(folders[name]) for name in NAMES[:2]}
    flags = {"max_loras_per_batch": 2, "max_loaded_loras": 2, "max_total_tokens": 4096}
    served = Engine(
        model_path=str(model_dir),
        dtype="float32",
        device="cpu",
        threads=1,
        tp_size=tp,
        ep_size=ep,
        attn_dp_size=groups,
        lora_paths=paths,
        **flags,
    )
    with served as engine:
        engine.load_lora_adapter("third", str(folders["third"]))
        asked = [(prompt, name) for name in (None, *NAMES) for prompt in PROMPTS]

        def generate() -> list[list[int]]:
            ids, names = [p for p, _ in asked], [n for _, n in asked]
            replies = engine.generate(input_ids=ids, sampling_params=GREEDY, lora_path=names)
            return [reply["output_ids"] for reply in replies]

        return [generate(), generate()]


@pytest.mark.slow
def test_two_processes_answer_as_one(model_dir: Path, folders: dict[str, Path]) -> None:
    one, again = answers(model_dir, folders, 1)
    assert one == again
    by_name = [one[n : n + len(PROMPTS)] for n in range(0, len(one), len(PROMPTS))]
    assert all(by_name[0] != other for other in by_name[1:])

    assert answers(model_dir, folders, 2) == [one, one]
    assert answers(model_dir, folders, 2, groups=2) == [one, one]


@pytest.mark.slow
def test_two_processes_with_different_experts_answer_as_one(tmp_path: Path) -> None:
    model = tmp_path / "mixtral"
    write(FAMILIES["mixtral"](), 7, model)
    folders = {
        name: write_random_adapter(tmp_path / name, model, seed, of=".experts.")
        for seed, name in enumerate(NAMES)
    }
    one = answers(model, folders, 1)
    assert one[0][: len(PROMPTS)] != one[0][len(PROMPTS) : 2 * len(PROMPTS)]

    assert answers(model, folders, 2, 2) == one
