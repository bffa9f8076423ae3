"""DeepSeek V4: entries, windows and streams equal transformers, however a prompt is computed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.executor.facts import check_tensors
from sylvan.runtime.models.registry import load_config
from tests.parity.checkpoints import VOCAB, write
from tests.parity.compare import EVERYTHING, compare
from tests.parity.rare import ALL
from tests.parity.rounding import Exact
from tests.parity.serving import Serving
from tests.support.oracle_drafter import OracleDrafter

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP8 = ("wq_a", "wq_b", "wo_a", "wo_b", "wkv")


def prompt(length: int, seed: int = 7) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


RUNNERS = ["eager", *(["program"] if describe().variant is not None else [])]


@pytest.mark.parametrize("runner", RUNNERS)
def test_chunks_and_shared_prefixes_change_nothing(runner, tmp_path):
    """Prompts part within a page and within entries; a hit ends within an entry of 32 tokens."""
    model = write(ALL["deepseek-v4"](), 11, tmp_path)
    assert check_tensors(load_config(tmp_path), tmp_path)
    first = prompt(60)
    second = first[:50] + prompt(20, 8)
    whole = Serving(tmp_path, runner=runner)
    pieces = Serving(tmp_path, runner=runner, chunk_tokens=7, max_batch_tokens=19)

    found = [whole.generate([text], max_new_tokens=6)[0] for text in (first, second)]
    assert whole.scheduler.load().cached_prompt_tokens > 0
    assert pieces.generate([first, second], max_new_tokens=6) == found

    rid = whole.add(second, logprobs=EVERYTHING, max_new_tokens=6)
    whole.run()
    rows, explained = Exact(model).rows(second + found[1])
    mine = np.concatenate([out.logprobs.chosen_logprobs for out in whole.outputs[rid]])
    answer = slice(len(second) - 1, -1)
    assert (np.abs(mine - rows[answer]).max(1) <= explained[answer]).all()


@pytest.mark.slow
def test_every_mode_equals_transformers(tmp_path):
    model = write(ALL["deepseek-v4"](), 11, tmp_path)

    found = compare(tmp_path, model)

    assert not found.modes
    assert found.excess <= 1


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_rejected_drafts_leave_no_trace(runner, tmp_path):
    """Entries and sums go back to where draft tokens were right."""
    write(ALL["deepseek-v4"](), 11, tmp_path)
    prompts = [prompt(length, length) for length in (30, 5, 61)]
    answers = Serving(tmp_path, runner=runner).generate(prompts, max_new_tokens=40)
    known = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
    drafter = OracleDrafter(known, VOCAB, right=0.6, tree=False, count=5)

    found = Serving(tmp_path, runner=runner, capabilities=(drafter,))

    assert found.generate(prompts, max_new_tokens=40) == answers
    assert 0.2 < found.scheduler.load().accept_rate < 0.9


def test_pages_that_would_cut_entries_are_refused(tmp_path):
    write(ALL["deepseek-v4"](), 11, tmp_path)

    with pytest.raises(ConfigError, match="a page must hold a multiple of 16"):
        Serving(tmp_path, page_size=8)


@pytest.mark.parametrize("runner", RUNNERS)
def test_published_numbers_of_4_and_8_bits_are_read_exactly(runner, tmp_path):
    """FP8 in blocks, MXFP4 experts, and scales that are powers of two, under published names."""
    sizes = ALL["deepseek-v4"]().to_dict() | {"moe_intermediate_size": 32}
    write(transformers.DeepseekV4Config(**sizes), 11, tmp_path)
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        kind = _four_bits if ".experts." in name and "shared" not in name else None
        if ".attn.w" in name and name.split(".")[-2] in FP8:
            kind = _eight_bits
        scale = name.replace(".weight", ".scale")
        if kind is None:
            stored[name] = plain[name] = tensor
        else:
            stored[name], stored[scale], plain[name] = kind(tensor)
    raw = json.loads((tmp_path / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}

    rows = []
    for tensors, more in ((plain, {}), (stored, {"quantization_config": settings})):
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(raw | more))
        serving = Serving(tmp_path, runner=runner)
        rid = serving.add(prompt(40), logprobs=EVERYTHING, max_new_tokens=2)
        serving.run()
        rows.append([out.logprobs.chosen_logprobs for out in serving.outputs[rid]])

    read, expected = np.concatenate(rows[1]), np.concatenate(rows[0])
    if runner == "eager":
        assert np.array_equal(read, expected)
    else:  # programs multiply by codes, and by scales afterwards
        assert np.allclose(read, expected, rtol=0, atol=2e-5)


def _bytes(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _four_bits(x_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed numbers, their scales, and what they say."""
    grouped = x_NK.unflatten(1, (-1, 32))
    exponents = (grouped.abs().amax(-1) / 6).log2().ceil()
    scale = exponents.exp2()[..., None]
    codes = ((grouped / scale).abs()[..., None] - E2M1).abs().argmin(-1)
    negative = grouped < 0
    bits = (codes + 8 * negative).flatten(1)
    packed = (bits[:, ::2] | bits[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    numbers = E2M1[codes] * torch.where(negative, -1.0, 1.0) * scale
    return packed, _bytes(exponents), numbers.flatten(1)


def _eight_bits(x_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in e4m3, with a scale for each block of 128 by 128."""
    rows, cols = x_NK.shape
    exponents = torch.full((-(-rows // 128), -(-cols // 128)), -9.0)
    numbers = (x_NK / 2**-9).to(torch.float8_e4m3fn)
    return numbers, _bytes(exponents), numbers.float() * 2**-9
