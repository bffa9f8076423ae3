"""Writes a tiny checkpoint whose model, config and tokenizer are Python files in its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 64

CONFIG = """
from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "own"
    attribute_map = {
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "queries",
        "num_key_value_heads": "keys",
        "max_position_embeddings": "longest",
    }

    def __init__(self, width=32, depth=2, queries=4, keys=2, longest=512, vocab_size=64, **kwargs):
        self.width, self.depth, self.queries, self.keys = width, depth, queries, keys
        self.longest, self.vocab_size = longest, vocab_size
        super().__init__(**kwargs)
"""

MODEL = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_own import OwnConfig


def plain(module, query, key, value, attention_mask, scaling, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def turned(x, angles):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class OwnAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer, True
        self.size = config.width // config.queries
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.kv = nn.Linear(config.width, 2 * config.keys * self.size, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x, angles, mask, past_key_values):
        heads = (*x.shape[:-1], -1, self.size)
        query = turned(self.q(x).view(heads).transpose(1, 2), angles)
        key, value = self.kv(x).view(heads).transpose(1, 2).chunk(2, dim=1)
        key = turned(key, angles)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, plain)
        out, _ = attend(self, query, key, value, mask, scaling=0.3)
        return self.out(out.reshape(x.shape))


class OwnLayer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attention = OwnAttention(config, layer)
        self.gate = nn.Linear(config.width, config.width)
        self.up = nn.Linear(config.width, config.width)

    def forward(self, x, *args):
        x = x + self.attention(nn.functional.rms_norm(x, x.shape[-1:]), *args)
        return x + torch.tanh(self.gate(x)) * self.up(x)


class OwnPreTrainedModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "trunk"
    _supports_attention_backend = True
    _supports_sdpa = True


class OwnModel(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(OwnLayer(config, i) for i in range(config.depth))
        self.post_init()

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None,
        use_cache=None, **kwargs
    ):
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        x = self.words(input_ids)
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device)[None]
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask,
            past_key_values=past_key_values, position_ids=position_ids,
        )
        half = self.config.width // self.config.queries // 2
        speeds = 100.0 ** -(torch.arange(half, device=x.device) / half)
        angles = (position_ids[..., None] * speeds)[:, None]
        for layer in self.layers:
            x = layer(x, angles, mask, past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values)


class OwnForCausalLM(OwnPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.trunk = OwnModel(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        found = self.trunk(input_ids, **kwargs)
        logits = 5 * torch.tanh(self.lm_head(found.last_hidden_state))
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)
"""

TOKENIZER = """
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    vocab_files_names = {"vocab_file": "own.words"}

    def __init__(self, vocab_file=None, **kwargs):
        words = Path(vocab_file).read_text().split()
        backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        super().__init__(tokenizer_object=backend, unk_token="w0", **kwargs)
"""

AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}


def write_own_code(folder: Path, *, weights: str = "safetensors", **changes: Any) -> Path:
    """Write the directory, always with the same weights. config.json leaves sizes to the config
    class.
    """
    import torch
    from safetensors.torch import save_file

    from sylvan.checkpoints.code import load_class

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "configuration_own.py").write_text(CONFIG)
    (folder / "modeling_own.py").write_text(MODEL)
    (folder / "tokenization_own.py").write_text(TOKENIZER)
    (folder / "own.words").write_text(" ".join(f"w{i}" for i in range(VOCAB)))
    config = {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": AUTO_MAP}
    config |= {"dtype": "float32", "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config | changes))
    mapped = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": mapped}))
    torch.manual_seed(5)
    model = load_class(folder, AUTO_MAP["AutoModelForCausalLM"])(
        load_class(folder, AUTO_MAP["AutoConfig"])()
    )
    state = {name: torch.randn_like(p) * 0.3 for name, p in model.state_dict().items()}
    if weights == "safetensors":
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(state, folder / "pytorch_model.bin")
    return folder
