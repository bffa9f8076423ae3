"""Heads turn in native attention where trying a model shows that nothing else sees them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from sylvan.runtime.executor.graphs.rotary import use_native_rotary
from sylvan.runtime.models.skeleton import NAME, RotaryCall, attach, paged_attention, skeleton
from tests.parity.checkpoints import SHAPE
from tests.parity.families import DENSE, EXPERT, FALLBACK


def made(config, dtype=torch.float32):
    """A model with weights, and what its attention shares."""
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    skeleton(kind, config, dtype)  # makes our attention known
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=NAME, dtype=dtype)
    step = attach(model.eval(), [name for name, _ in model.named_modules()])
    step.width = getattr(config, "head_dim", None) or config.hidden_size // 4
    return model, step


def llama():
    return transformers.LlamaConfig(**SHAPE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [llama, DENSE["gemma3"], DENSE["gpt-neox"], EXPERT["qwen3-moe"]])
def test_models_that_attend_right_after_turning_leave_it_to_attention(config, dtype):
    before = modeling_llama.apply_rotary_pos_emb
    model, step = made(config(), dtype)

    assert use_native_rotary(model, step, dtype)

    assert [module for module in model.modules() if "forward" in vars(module)]
    assert modeling_llama.apply_rotary_pos_emb is before
    assert step.batch is None


class Scaling(LlamaAttention):
    """Does something with queries between rotating them and attending."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        heads = [
            part(hidden_states).view(shape).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        ]
        query, key = apply_rotary_pos_emb(*heads[:2], *position_embeddings)
        if self.scales:
            query = query * 2
        found, _ = paged_attention(self, query, key, heads[2], None, self.scaling)
        if not self.scales:  # but looks at them
            found = found + query.transpose(1, 2)
        return self.o_proj(found.flatten(2)), None


@pytest.mark.parametrize("scales", [True, False])
def test_what_looks_at_turned_heads_is_left_alone(scales):
    model, step = made(llama())
    for layer in model.model.layers:
        layer.self_attn.__class__ = Scaling
        layer.self_attn.scales = scales

    assert not use_native_rotary(model, step, torch.float32)

    assert not [layer for layer in model.model.layers if "forward" in vars(layer.self_attn)]


@pytest.mark.parametrize("config", [FALLBACK["cohere-qk-norm"], EXPERT["deepseek-v3"]])
def test_other_ways_of_turning_are_left_alone(config):
    model, step = made(config())
    use_native_rotary(model, step, torch.float32)
    forwards = [name for name, part in model.named_modules() if "forward" in vars(part)]
    assert not [name for name in forwards if "attn" in name]


def test_heads_that_are_not_those_to_be_turned_are_refused():
    _, step = made(llama())
    step.batch = SimpleNamespace(attention=None)
    heads = [torch.zeros(1, 4, 2, 16), torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 2, 16)]
    step.rotary = RotaryCall(heads[0], heads[1], torch.zeros(2, 16))
    module = SimpleNamespace(sylvan_attention=SimpleNamespace(step=step, name="x"), is_causal=True)
    with pytest.raises(RuntimeError, match="changed between"):
        paged_attention(module, copy.copy(heads[0]) + 1, heads[1], heads[2], None)
