"""Adapters of an engine in a program: from a directory, and from tensors that the program has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sylvan import Engine
from sylvan.protocol.errors import RequestError
from tests.support.adapters import write_random_adapter
from tests.support.random_model import write_random_model

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
PROMPT = [5, 9, 200, 31]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folder(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_adapter(tmp_path_factory.mktemp("adapter"), model_dir, 1)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Engine]:
    with Engine(model_path=str(model_dir), enable_lora=True, max_total_tokens=4096) as made:
        yield made


def ids(engine: Engine, adapter: str | None) -> list[int]:
    reply: Any = engine.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path=adapter)
    return reply["output_ids"]


async def test_one_that_is_sent_answers_as_its_directory(engine: Engine, folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())

    assert engine.load_lora_adapter("read", str(folder)) == (True, "")
    assert engine.load_lora_adapter_from_tensors("sent", tensors, config) == (True, "")
    pairs = list(tensors.items())
    done = await engine.async_load_lora_adapter_from_tensors("later", pairs, config)

    assert done == (True, "")
    want = ids(engine, "read")
    assert ids(engine, "sent") == ids(engine, "later") == want != ids(engine, None)
    assert engine.unload_lora_adapter("sent", abort_requests=True) == (True, "")
    with pytest.raises(RequestError, match="no adapter called 'sent'"):
        ids(engine, "sent")
    bad = tensors | {pairs[0][0]: torch.full_like(pairs[0][1], torch.nan)}
    refused, why = engine.load_lora_adapter_from_tensors("sent", bad, config)
    assert not refused
    assert "not finite" in why
    assert ids(engine, "read") == want


async def test_one_whose_sums_overflow_hurts_no_other(engine: Engine, folder: Path) -> None:
    """Each number is finite, but what rows come to is not."""
    tensors = {
        name: torch.full_like(tensor, 3e38)
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    engine.load_lora_adapter("good", str(folder))
    want = [ids(engine, name) for name in (None, "good")]
    assert engine.load_lora_adapter_from_tensors("endless", tensors, config) == (True, "")

    async def ask(name: str | None) -> Any:
        try:
            reply: Any = await engine.async_generate(
                input_ids=PROMPT, sampling_params=GREEDY, lora_path=name
            )
        except RequestError as error:
            return str(error)
        return reply["output_ids"]

    found = await asyncio.gather(*(ask(name) for name in ("endless", None, "endless", "good")))

    assert "not a number" in found[0]
    assert found[0] == found[2]
    assert [found[1], found[3]] == want
