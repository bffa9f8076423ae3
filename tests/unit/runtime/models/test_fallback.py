"""Which path a checkpoint takes, and what transformers-backed models are refused for."""

from __future__ import annotations

import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.registry import choose_path

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def raw(architecture: str, model_type: str, **changes: object) -> dict[str, object]:
    return SHAPE | {"architectures": [architecture], "model_type": model_type} | changes


def test_known_family_takes_the_native_path():
    choice = choose_path(raw("LlamaForCausalLM", "llama"))

    assert (choice.config.path, choice.why) == ("native", "a native family")


def test_unknown_switch_of_a_known_family_goes_through_transformers():
    choice = choose_path(raw("CohereForCausalLM", "cohere", use_qk_norm=True))

    assert choice.config.path == "transformers"
    assert "layer norms of heads (use_qk_norm)" in choice.why


def test_other_family_goes_through_transformers_with_its_own_shape():
    config = choose_path(raw("Cohere2MoeForCausalLM", "cohere2_moe", head_dim=12)).config

    assert config.path == "transformers"
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 12)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (raw("DogeForCausalLM", "doge"), "masks or biases attention"),
        (raw("CodeGenForCausalLM", "codegen"), "computes attention by itself|cannot be traced"),
        (raw("MineForCausalLM", "mine"), "transformers has no model_type 'mine'"),
        (
            raw("MineForCausalLM", "mine", auto_map={"AutoModelForCausalLM": "m.M"}),
            r"Python code of the checkpoint \(m\.M\), which is run only with --trust-remote-code",
        ),
        (
            raw("DbrxForCausalLM", "dbrx", attn_config={"clip_qkv": 8, "kv_n_heads": 2}),
            "attn_config and ffn_config must be objects",
        ),
        (
            raw("MixtralForCausalLM", "mixtral", num_local_experts=1),
            "2 experts per token, but the model has 1",
        ),
        (
            raw("DeepseekV3ForCausalLM", "deepseek_v3", n_group=3, n_routed_experts=8),
            "do not divide into 3 groups|at least 1 inner size",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(config, words):
    with pytest.raises(ConfigError, match=words) as caught:
        choose_path(config)
    assert "\n" not in str(caught.value)
