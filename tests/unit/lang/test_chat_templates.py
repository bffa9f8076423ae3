from __future__ import annotations

import pytest

from sylvan.lang.chat_templates import ChatTemplateRegistry, MessageFormat
from sylvan.protocol.errors import ConfigError

NAMES = {
    *("default", "claude", "chatml", "chatml-llava", "qwen", "qwen2-vl", "vicuna_v1.1"),
    *("llama-2-chat", "mistral", "llama-3-instruct", "llama-3-instruct-llava", "llama-4"),
    *("minicpmv", "minicpmo", "janus-pro", "janus", "yi-1.5", "yi-vl", "gemma-it", "gemma-4-it"),
    *("dbrx-instruct", "c4ai-command-r", "internvl-2-5", "interns1", "granite-3-instruct"),
    *("deepseek-v3", "glm-4v"),
}
CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]


@pytest.fixture
def registry() -> ChatTemplateRegistry:
    return ChatTemplateRegistry()


def test_registry_has_the_contracts_templates(registry):
    assert set(registry.names()) == NAMES


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-chat"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3-instruct"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral"),
        ("mistral-community/pixtral-12b", "mistral"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2-vl"),
        ("Qwen/Qwen2.5-7B", "default"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3-Base", "default"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("deepseek-ai/Janus-Pro-7B", "janus-pro"),
        ("lmsys/vicuna-7b-v1.5", "vicuna_v1.1"),
        ("liuhaotian/llava-v1.6-34b", "chatml-llava"),
        ("lmms-lab/llava-onevision-qwen2-7b-ov", "chatml-llava"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "chatml"),
        ("01-ai/Yi-1.5-9B-Chat", "yi-1.5"),
        ("01-ai/Yi-VL-6B", "yi-vl"),
        ("google/gemma-2-9b-it", "gemma-it"),
        ("google/gemma-3-4b-pt", "gemma-it"),
        ("google/gemma-4-12b-it", "gemma-4-it"),
        ("databricks/dbrx-instruct", "dbrx-instruct"),
        ("CohereForAI/c4ai-command-r-v01", "c4ai-command-r"),
        ("ibm-granite/granite-3.0-8b-instruct", "granite-3-instruct"),
        ("OpenGVLab/InternVL2_5-8B", "internvl-2-5"),
        ("internlm/Intern-S1", "interns1"),
        ("openbmb/MiniCPM-V-2_6", "minicpmv"),
        ("openbmb/MiniCPM-o-2_6", "minicpmo"),
        ("THUDM/GLM-4.1V-9B-Thinking", "glm-4v"),
        ("OrionStarAI/Orion-14B-Chat", "claude"),
        ("/assets/sapling", "chatml"),
        ("some/other-model", "default"),
    ],
)
def test_template_is_chosen_by_model_path(registry, path, name):
    assert registry.for_model(path).name == name


def test_plain_prompt_is_prefix_content_suffix(registry):
    prompt = registry.get("chatml").get_prompt(CHAT[:2])
    assert prompt == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"


def test_llama2_puts_the_system_message_inside_the_first_user_message(registry):
    prompt = registry.get("llama-2-chat").get_prompt(CHAT)
    assert prompt == "[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST]A </s><s>[INST] V [/INST]"


def test_missing_system_content_means_the_default(registry):
    messages = [{"role": "system", "content": None}, {"role": "user", "content": "U"}]
    assert "You are a helpful assistant." in registry.get("qwen").get_prompt(messages)
    assert registry.get("chatml").get_prompt(messages) == "<|im_start|>user\nU<|im_end|>\n"


def test_every_template_spells_all_roles_of_a_chat(registry):
    for name in registry.names():
        prompt = registry.get(name).get_prompt(CHAT)
        assert [prompt.count(text) > 0 for text in "SUAV"] == [True] * 4, name


def test_custom_templates_and_matching_come_first(registry):
    mine = MessageFormat(name="mine", default_system_prompt=None, role_prefix_and_suffix={})
    registry.register(mine)
    registry.register_matching(lambda path: "mine" if "qwen" in path else None)

    assert registry.for_model("qwen-chat") is mine
    assert registry.for_model("tinyllama").name == "chatml"


def test_unknown_name_lists_the_known(registry):
    with pytest.raises(ConfigError, match="chatml"):
        registry.get("chatmll")
