"""Adapters on JAX give the tokens of the native program: mixed, cached, changed while serving."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sylvan.kernels.native.library import describe
from tests.parity.checkpoints import FAMILIES, VOCAB, write
from tests.parity.families import EXPERT
from tests.parity.rare import ALL
from tests.support.adapters import AdapterServing, write_adapter

pytestmark = [
    pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled"),
    pytest.mark.filterwarnings("ignore"),  # peft's own
]

ENDS = {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}
STACKS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
CASES = {
    "llama": (FAMILIES["llama"], {}),
    "llama with its ends": (FAMILIES["llama"], ENDS),
    "mixtral's experts": (EXPERT["mixtral"], STACKS),
    "lfm2": (ALL["lfm2"], {}),
}
NAMES = None, "first", "second", "third"


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_native_program(name, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    config, fields = CASES[name]
    write(config(), 1, tmp_path / "base")
    for seed, adapter in enumerate(NAMES[1:]):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        write_adapter(model, tmp_path / adapter, seed, **fields, r=4 - seed)
    folders = {adapter: tmp_path / adapter for adapter in NAMES[1:]}
    rng = np.random.default_rng(4)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in (21, 5, 17, 9)]
    found = {}
    for device in ("cpu", "jax"):
        serving = AdapterServing(
            tmp_path / "base",
            folders,
            {"max_per_batch": 2, "max_rank": 8},  # three take turns in two slots
            options={"device": device, "dtype": "float32", "max_samples": 0},
            max_batch_tokens=32,
            max_running_reqs=4,
        )
        rounds = []
        for together in (False, True, True):  # the last is cached
            rids = []
            for prompt, adapter in zip(prompts, NAMES, strict=True):
                rids.append(serving.ask(prompt, adapter, max_new_tokens=6))
                if not together:
                    serving.run()
            serving.run()
            rounds.append([serving.tokens[rid] for rid in rids])
        if device == "jax":
            assert serving.facts.use()["recompiled"] == 0
        found[device] = rounds
        serving.close()

    assert found["jax"] == found["cpu"]
    assert found["cpu"][0] == found["cpu"][1] == found["cpu"][2]
    assert len({tuple(tokens) for tokens in found["cpu"][0]}) == len(NAMES)
