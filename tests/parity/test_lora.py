"""Adapters beside the base model against `peft` inside of transformers, family by family."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sylvan.protocol.requests import LogprobOptions
from tests.parity.checkpoints import FAMILIES, VOCAB, write
from tests.parity.families import DENSE, EXPERT
from tests.parity.rare import ALL
from tests.parity.rounding import Exact
from tests.support.adapters import AdapterServing, write_adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own, about transformers and torch

NEW = 6
EVERYTHING = LogprobOptions(token_ids=tuple(range(VOCAB)))
ENDS = {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}
TIED_ENDS = {"target_modules": ["q_proj", "down_proj", "embed_tokens"]}
ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
STACKS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES = {
    "llama": (FAMILIES["llama"], {}),
    "llama-tied-bias": (FAMILIES["llama-tied-bias"], {}),
    "qwen3": (FAMILIES["qwen3"], {}),
    "gemma2": (DENSE["gemma2"], {}),
    "gpt2": (DENSE["gpt2"], {"fan_in_fan_out": True}),
    "phi3": (DENSE["phi3"], {}),
    "falcon-40b": (DENSE["falcon-40b"], {}),
    "gpt-neox": (DENSE["gpt-neox"], {}),
    "mixtral": (EXPERT["mixtral"], ATTENTION),
    "mixtral's experts": (EXPERT["mixtral"], STACKS),
    "qwen3-moe's experts": (EXPERT["qwen3-moe"], STACKS),
    "deepseek-v2's experts": (EXPERT["deepseek-v2"], STACKS | {"target_modules": ["o_proj"]}),
    "llama with its ends": (FAMILIES["llama"], ENDS),
    "tied ends": (FAMILIES["llama-tied-bias"], TIED_ENDS),
    "scaled ends": (DENSE["gemma2"], TIED_ENDS),
    "lfm2": (ALL["lfm2"], {}),  # projections around a convolution
}
ADAPTERS = {
    "first": {"r": 4, "lora_alpha": 8},
    "second": {"r": 3, "lora_alpha": 5, "use_rslora": True},
}


@pytest.fixture(scope="module", autouse=True)
def as_in_a_server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        yield


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A model, two adapters, and by name what transformers computes with them."""
    config, fields = CASES[request.param]
    folder = tmp_path_factory.mktemp("lora")
    base = write(config(), 1, folder / "base")
    models = {None: Exact(base)}
    for seed, (name, its) in enumerate(ADAPTERS.items()):
        model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        models[name] = Exact(write_adapter(model, folder / name, seed, **fields | its))
    return folder, models


@pytest.mark.slow
def test_as_peft_computes_alone_mixed_cold_and_cached(case):
    folder, models = case
    prompts = [np.random.default_rng(n).integers(4, VOCAB, n).tolist() for n in (37, 5)]
    serving = AdapterServing(
        folder / "base", {name: folder / name for name in ADAPTERS}, runner="auto"
    )

    def answers(together: bool) -> dict:
        found = {}
        for name in models:
            for number, prompt in enumerate(prompts):
                rid = serving.ask(prompt, name, logprobs=EVERYTHING, max_new_tokens=NEW)
                found[name, number] = rid
                if not together:
                    serving.run()
        serving.run()
        return found

    rounds = [answers(together) for together in (False, True, True)]  # the last two are cached

    seen = []
    for name, model in models.items():
        for number, prompt in enumerate(prompts):
            rids = [found[name, number] for found in rounds]
            tokens = serving.tokens[rids[0]]
            assert all(serving.tokens[rid] == tokens for rid in rids)
            want, bound = (part[len(prompt) - 1 :] for part in model.rows(prompt + tokens[:-1]))
            for rid in rids:
                got = np.concatenate([o.logprobs.chosen_logprobs for o in serving.outputs[rid]])
                assert (np.abs(got - want).max(1) <= bound).all()
                seen.append(got[0])
    base, first, second = (seen[6 * number] for number in range(3))
    assert min(np.abs(x - y).max() for x, y in ((base, first), (first, second))) > 0.1


RANKED = (
    "llama-tied-bias",
    "llama with its ends",
    "gpt2",
    "phi3",
    "falcon-40b",
    "lfm2",
    "qwen3-moe's experts",
)
"""Bias, turned matrices, joined ones, one head of keys for several ranks, convolutions, experts."""


@pytest.mark.parametrize("case", RANKED, indirect=True)
def test_two_ranks_answer_as_one(case):
    ranks_answer_as_one(case, {"ranks": 2})


@pytest.mark.parametrize(
    "case",
    [pytest.param("mixtral's experts", marks=pytest.mark.slow), "qwen3-moe's experts"],
    indirect=True,
)
def test_ranks_with_different_experts_answer_as_one(case):
    ranks_answer_as_one(case, {"ranks": 2, "ep": 2, "copies": 2})


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("tied ends", marks=pytest.mark.slow),
        pytest.param("qwen3-moe's experts", marks=pytest.mark.slow),
        "llama with its ends",
    ],
    indirect=True,
)
def test_stages_answer_as_one(case):
    ranks_answer_as_one(case, {"stages": 2})


def ranks_answer_as_one(case, several):
    folder, models = case
    prompts = [np.random.default_rng(n).integers(4, VOCAB, n).tolist() for n in (37, 5)]
    folders = {name: folder / name for name in ADAPTERS}

    def answers(given: dict[str, int]) -> tuple[list, np.ndarray]:
        serving = AdapterServing(folder / "base", folders, runner="eager", **given)
        rids = [
            serving.ask(prompt, name, logprobs=EVERYTHING, max_new_tokens=NEW)
            for name in models
            for prompt in prompts
        ]
        serving.run()
        serving.close()
        rows = [out.logprobs.chosen_logprobs for rid in rids for out in serving.outputs[rid]]
        return [serving.tokens[rid] for rid in rids], np.concatenate(rows)

    (tokens, rows), (found, found_rows) = answers({}), answers(several)

    assert found == tokens
    assert np.abs(found_rows - rows).max() < 2e-3


NAMES = {"qwen3-moe's experts": ("mlp", "gate_proj", "up_proj", "down_proj")}
NAMES["mixtral's experts"] = ("block_sparse_moe", "w1", "w3", "w2")


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_experts_may_come_one_by_one(case, request, tmp_path):
    """As the checkpoint names them, and `peft` did before the experts were stacks."""
    folder, _ = case
    path, gate, up, down = NAMES[request.node.callspec.params["case"]]
    stacks = load_file(folder / "first" / "adapter_model.safetensors")
    single: dict[str, torch.Tensor] = {}
    for name, matrix in stacks.items():
        if ".experts." not in name:
            single[name] = matrix
            continue
        head, _, rest = name.partition(".mlp.experts.")
        of_first, side = rest.startswith("base_layer."), rest.split("lora_")[1][0]
        parts = (gate, up) if of_first else (down,)
        count = len(stacks[name.replace("lora_B", "lora_A")]) // 4
        for expert in range(count):
            for number, part in enumerate(parts):
                if side == "A":
                    own = matrix.unflatten(0, (count, -1))[expert]
                else:
                    own = matrix.unflatten(1, (-1, count))[..., expert].chunk(len(parts))[number]
                key = f"{head}.{path}.experts.{expert}.{part}.lora_{side}.weight"
                single[key] = own.clone().contiguous()
    (tmp_path / "single").mkdir()
    save_file(single, tmp_path / "single" / "adapter_model.safetensors")
    config = json.loads((folder / "first" / "adapter_config.json").read_text())
    config |= {"target_parameters": None, "target_modules": ["q_proj", gate, up, down]}
    (tmp_path / "single" / "adapter_config.json").write_text(json.dumps(config))
    folders = {"stacked": folder / "first", "single": tmp_path / "single"}
    serving = AdapterServing(folder / "base", folders)

    rids = [serving.ask(range(4, 20), name, logprobs=EVERYTHING) for name in (None, *folders)]
    serving.run()

    _, stacked, one_by_one = (serving.tokens[rid] for rid in rids)
    rows = [serving.outputs[rid][0].logprobs.chosen_logprobs for rid in rids]
    assert stacked == one_by_one
    assert np.array_equal(rows[1], rows[2])
    assert not np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("family", ["gpt-oss", "llama4"])
def test_stacks_in_another_order_are_refused(family, tmp_path):
    config = EXPERT[family]()
    write(config, 1, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    path = "mlp" if family == "gpt-oss" else "feed_forward"
    fields = {"target_modules": ["q_proj"], "target_parameters": [f"{path}.experts.gate_up_proj"]}
    write_adapter(model, tmp_path / "one", 1, **fields)
    serving = AdapterServing(tmp_path / "base", {})

    with pytest.raises(AssertionError, match="experts") as refused:
        serving.load("one", tmp_path / "one")

    assert "cannot change at run time" in str(refused.value)
