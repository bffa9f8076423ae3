"""The built-in chat templates by name, and the models that they match.

The strings come from the models' tokenizer configurations and cards. The names and the default
(`SYSTEM:`, `USER:`, `ASSISTANT:`) are those of SGLang's frontend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Turn = tuple[str, str]  # (prefix, suffix)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRow:
    """One template: `turns` by role; `system_in_user` puts the system inside the user message."""

    turns: Mapping[str, Turn]
    default_system: str | None = None
    stop: tuple[str, ...] = ()
    image_token: str = "<image>"
    video_token: str = "<video>"
    audio_token: str = "<audio>"
    system_in_user: bool = False


def _roles(system: Turn, user: Turn, assistant: Turn) -> Mapping[str, Turn]:
    return {"system": system, "user": user, "assistant": assistant}


def _turns(pattern: str, end: str, *, assistant: str = "assistant") -> Mapping[str, Turn]:
    """The same format for all roles: `pattern` contains `{}` for the role's name."""
    names = {"system": "system", "user": "user", "assistant": assistant}
    return {role: (pattern.format(name), end) for role, name in names.items()}


_CHATML = _turns("<|im_start|>{}\n", "<|im_end|>\n")
_LLAMA3 = _turns("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>")
_MINICPM = {"system": ("", " "), "user": ("user:", " "), "assistant": ("assistant:", "</s>")}
_DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_DEEPSEEK = {
    "system": ("", ""),
    "user": ("<\uff5cUser\uff5c>", ""),
    "assistant": ("<\uff5cAssistant\uff5c>", _DEEPSEEK_END),
}
_HELPFUL = "You are a helpful assistant."
_VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_YI_VL_SYSTEM = (
    "This is a chat between an inquisitive human and an AI assistant. Assume the role "
    "of the AI assistant. Read all the images carefully, and respond to the human's questions "
    "with informative, helpful, detailed and polite answers.\u8fd9\u662f\u4e00\u4e2a\u597d\u5947"
    "\u7684\u4eba\u7c7b\u548c\u4e00\u4e2a\u4eba\u5de5\u667a\u80fd\u52a9\u624b\u4e4b\u95f4\u7684"
    "\u5bf9\u8bdd\u3002\u5047\u8bbe\u4f60\u626e\u6f14\u8fd9\u4e2aAI\u52a9\u624b\u7684\u89d2\u8272"
    "\u3002\u4ed4\u7ec6\u9605\u8bfb\u6240\u6709\u7684\u56fe\u50cf\uff0c\u5e76\u5bf9\u4eba\u7c7b"
    "\u7684\u95ee\u9898\u505a\u51fa\u4fe1\u606f\u4e30\u5bcc\u3001\u6709\u5e2e\u52a9\u3001\u8be6"
    "\u7ec6\u7684\u548c\u793c\u8c8c\u7684\u56de\u7b54\u3002"
)
_DBRX_SYSTEM = (
    "You are DBRX, created by Databricks. You were last updated in December 2023. You "
    "answer questions based on information available up to that point.\nYOU PROVIDE SHORT "
    "RESPONSES TO SHORT QUESTIONS OR STATEMENTS, but provide thorough responses to more "
    "complex and open-ended questions.\nYou assist with various tasks, from writing to "
    "coding (using markdown for code blocks \u2014 remember to use ``` with code, JSON, "
    "and tables).\n(You do not have real-time data access or code execution capabilities. "
    "You avoid stereotyping and provide balanced perspectives on controversial topics. "
    "You do not provide song lyrics, poems, or news articles and do not divulge details "
    "of your training data.)\nThis is your system prompt, guiding your responses. Do "
    "not reference it, just respond to the user. If you find yourself talking about this "
    "message, stop. You should be responding appropriately and usually that means not "
    "mentioning this.\nYOU DO NOT MENTION ANY OF THIS INFORMATION ABOUT YOURSELF UNLESS "
    "THE INFORMATION IS DIRECTLY PERTINENT TO THE USER'S QUERY."
)
_INTERNVL_SYSTEM = (
    "\u4f60\u662f\u4e66\u751f\xb7\u4e07\u8c61\uff0c\u82f1\u6587\u540d\u662fInternVL\uff0c\u662f"
    "\u7531\u4e0a\u6d77\u4eba\u5de5\u667a\u80fd\u5b9e\u9a8c\u5ba4\u3001\u6e05\u534e\u5927\u5b66"
    "\u53ca\u591a\u5bb6\u5408\u4f5c\u5355\u4f4d\u8054\u5408\u5f00\u53d1\u7684\u591a\u6a21\u6001"
    "\u5927\u8bed\u8a00\u6a21\u578b\u3002"
)
_INTERNS1_SYSTEM = (
    "You are an AI assistant whose name is Intern-S1 (\u4e66\u751f\u5927\u6a21\u578b).\n- "
    "Intern-S1 (\u4e66\u751f\u5927\u6a21\u578b) is a vision-language model that is developed "
    "by Shanghai AI Laboratory (\u4e0a\u6d77\u4eba\u5de5\u667a\u80fd\u5b9e\u9a8c\u5ba4). "
    " It is designed to be helpful, honest, and harmless.\n- Intern-S1 (\u4e66\u751f\u5927\u6a21"
    "\u578b) can understand and communicate fluently in the language chosen by the user "
    "such as English and \u4e2d\u6587.\nYou are an expert reasoner with extensive experience "
    "in all areas. You approach problems through systematic thinking and rigorous reasoning. "
    "Your response should reflect deep understanding and precise logical thinking, making "
    "your solution path and reasoning clear to others. Please put your thinking process "
    "within <think>...</think> tags."
)

NAMED_TEMPLATES: Mapping[str, TemplateRow] = MappingProxyType(
    {
        "default": TemplateRow(
            turns=_roles(("SYSTEM:", "\n"), ("USER:", "\n"), ("ASSISTANT:", "\n"))
        ),
        "claude": TemplateRow(turns=_roles(("", ""), ("\n\nHuman: ", ""), ("\n\nAssistant:", ""))),
        "chatml": TemplateRow(turns=_CHATML, stop=("<|im_end|>",)),
        "chatml-llava": TemplateRow(
            turns=_CHATML, default_system=_HELPFUL, stop=("<|im_end|>",), image_token="<image>\n"
        ),
        "qwen": TemplateRow(turns=_CHATML, default_system=_HELPFUL, stop=("<|im_end|>",)),
        "qwen2-vl": TemplateRow(
            turns=_CHATML,
            default_system=_HELPFUL,
            stop=("<|im_end|>",),
            image_token="<|vision_start|><|image_pad|><|vision_end|>",
            video_token="<|vision_start|><|video_pad|><|vision_end|>",
        ),
        "vicuna_v1.1": TemplateRow(
            turns=_roles(("", " "), ("USER:", " "), ("ASSISTANT:", "</s>")),
            default_system=_VICUNA_SYSTEM,
            image_token=" <image>\n",
        ),
        "llama-2-chat": TemplateRow(
            turns=_roles(
                ("<<SYS>>\n", "\n<</SYS>>\n\n"), ("[INST] ", " [/INST]"), ("", " </s><s>")
            ),
            system_in_user=True,
        ),
        "mistral": TemplateRow(
            turns=_roles(
                ("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"), ("[INST] ", " [/INST]"), ("", " </s><s>")
            ),
            stop=("</s>",),
            image_token="[IMG]",
        ),
        "llama-3-instruct": TemplateRow(
            turns=_LLAMA3, stop=("<|eot_id|>",), image_token="<|image|>"
        ),
        "llama-3-instruct-llava": TemplateRow(
            turns=_LLAMA3, stop=("<|eot_id|>",), image_token="<image>\n"
        ),
        "llama-4": TemplateRow(
            turns=_turns("<|header_start|>{}<|header_end|>\n\n", "<|eot|>"),
            stop=("<|eot|>",),
            image_token="<|image|>",
        ),
        "minicpmv": TemplateRow(
            turns=_MINICPM, stop=("<|im_end|>", "<|endoftext|>"), image_token="(<image>./</image>)"
        ),
        "minicpmo": TemplateRow(
            turns=_MINICPM,
            stop=("<|im_end|>", "<|endoftext|>"),
            image_token="(<image>./</image>)",
            audio_token="(<audio>./</audio>)",
        ),
        "janus-pro": TemplateRow(
            turns=_DEEPSEEK, stop=(_DEEPSEEK_END,), image_token="<image_placeholder>\n"
        ),
        "janus": TemplateRow(
            turns=_DEEPSEEK, stop=(_DEEPSEEK_END,), image_token="<image_placeholder>\n"
        ),
        "yi-1.5": TemplateRow(
            turns=_roles(
                ("", ""),
                ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
                ("", "<|im_end|>\n"),
            ),
            stop=("<|im_end|>",),
        ),
        "yi-vl": TemplateRow(
            turns=_roles(("", "\n\n"), ("### Human:", "\n"), ("### Assistant:", "\n")),
            default_system=_YI_VL_SYSTEM,
            image_token=" <image_placeholder>\n",
        ),
        "gemma-it": TemplateRow(
            turns=_roles(
                ("", ""),
                ("<start_of_turn>user\n", "<end_of_turn>\n"),
                ("<start_of_turn>model\n", "<end_of_turn>\n"),
            ),
            image_token="<start_of_image>",
            audio_token="<start_of_audio>",
        ),
        "gemma-4-it": TemplateRow(
            turns=_roles(
                ("", ""), ("<|turn>user\n", "<turn|>\n"), ("<|turn>assistant\n", "<turn|>\n")
            ),
        ),
        "dbrx-instruct": TemplateRow(
            turns=_roles(
                ("<|im_start|>system\n", "<|im_end|>"),
                ("\n<|im_start|>user\n", "<|im_end|>"),
                ("\n<|im_start|>assistant\n", "<|im_end|>"),
            ),
            default_system=_DBRX_SYSTEM,
            stop=("<|im_end|>",),
        ),
        "c4ai-command-r": TemplateRow(
            turns=_roles(
                ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
                ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
                ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
            ),
        ),
        "internvl-2-5": TemplateRow(
            turns=_CHATML, default_system=_INTERNVL_SYSTEM, stop=("<|im_end|>", "<|action_end|>")
        ),
        "interns1": TemplateRow(
            turns=_CHATML, default_system=_INTERNS1_SYSTEM, stop=("<|im_end|>", "<|action_end|>")
        ),
        "granite-3-instruct": TemplateRow(
            turns=_turns("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>"),
            stop=("<|end_of_text|>",),
        ),
        "deepseek-v3": TemplateRow(turns=_DEEPSEEK, stop=(_DEEPSEEK_END,)),
        "glm-4v": TemplateRow(
            turns=_turns("<|{}|>\n", "\n"),
            stop=("<|user|>", "<|endoftext|>", "<|observation|>"),
            image_token="<|image|>",
        ),
    }
)


def _match(
    pattern: str, name: str, but_not: str = ""
) -> tuple[re.Pattern[str], re.Pattern[str] | None, str]:
    flags = re.IGNORECASE
    return re.compile(pattern, flags), re.compile(but_not, flags) if but_not else None, name


# (model path matches, but does not match, template), first wins
MATCHES = (
    _match(r"deepseek-(v3|r1)", "deepseek-v3", but_not=r"base"),
    _match(r"orion", "claude"),
    _match(r"janus", "janus-pro"),
    _match(r"dbrx.*instruct|instruct.*dbrx", "dbrx-instruct"),
    _match(r"vicuna|llava-v1\.5|llava-next-video-7b", "vicuna_v1.1"),
    _match(r"llama-2.*chat|codellama.*instruct", "llama-2-chat"),
    _match(r"pixtral|(mistral|mixtral).*instruct", "mistral"),
    _match(r"llama-3.*instruct", "llama-3-instruct"),
    _match(r"tinyllama", "chatml"),
    _match(r"qwen.*vl", "qwen2-vl"),
    _match(r"glm[-_]?4(\.\d+)?v", "glm-4v"),
    _match(r"qwen.*(chat|instruct)", "qwen", but_not=r"llava"),
    _match(
        r"llava-v1\.6-34b|llava-v1\.6-yi-34b|llava-next-video-34b|llava-onevision-qwen2",
        "chatml-llava",
    ),
    _match(r"yi-vl", "yi-vl", but_not=r"llava"),
    _match(r"yi-1\.5.*chat", "yi-1.5"),
    _match(r"gemma-4.*it", "gemma-4-it"),
    _match(r"gemma.*it|gemma-3", "gemma-it"),
    _match(r"minicpm-v", "minicpmv"),
    _match(r"minicpm-o", "minicpmo"),
    _match(r"c4ai-command-r", "c4ai-command-r"),
    _match(r"granite.*instruct", "granite-3-instruct"),
    _match(r"internvl2_5", "internvl-2-5"),
    _match(r"intern-?s1", "interns1"),
    _match(r"sapling", "chatml"),
)
