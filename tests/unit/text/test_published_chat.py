"""Chats with images equal those of published code: strings with placeholders."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from sylvan.protocol.errors import RequestError
from sylvan.protocol.media import IMAGE_TOKENS
from sylvan.text.chat_template import ChatRequest, ChatTemplate
from sylvan.text.tokenizer import Tokenizer
from tests.support.scripted import write_checkpoint

PHI = (
    "{% for message in messages %}{{'<|' + message['role'] + '|>' + '\n' + message['content'] + "
    "'<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{- '<|assistant|>\n' -}}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GIVEN = {
    "Phi3VForCausalLM": PHI,
    "MiniCPMV": CHATML,
    "InternVLChatModel": CHATML,
    "DeepseekVLV2ForCausalLM": None,
}
IMAGE = {"type": "image"}


def written(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def expected(architecture: str, turns: list[tuple[str, str]]) -> str:
    """Turns, whose images are placeholders already, as the published code writes them."""
    if architecture == "DeepseekVLV2ForCausalLM":
        text = "".join(message + "\n\n" for role, message in turns if role == "system")
        names, ends = {"user": "<|User|>", "assistant": "<|Assistant|>"}, ("\n\n", "</s>")
        spoken = [turn for turn in turns if turn[0] != "system"]
        for number, (role, message) in enumerate(spoken):
            text += names[role] + ": " + message + ends[number % 2]
        return "<s>" + text + "<|Assistant|>:"
    if GIVEN[architecture] is CHATML:
        text = "".join(f"<|im_start|>{role}\n{message}<|im_end|>\n" for role, message in turns)
        return text + "<|im_start|>assistant\n"
    return "".join(f"<|{role}|>\n{message}<|end|>\n" for role, message in turns) + "<|assistant|>\n"


@pytest.fixture(params=GIVEN)
def architecture(request) -> str:
    return request.param


@pytest.fixture
def chat(architecture, tmp_path) -> ChatTemplate:
    write_checkpoint(tmp_path)
    path = tmp_path / "tokenizer.json"
    backend = Backend.from_file(str(path))
    names = (*IMAGE_TOKENS.values(), "<s>", "</s>")
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in names])
    backend.save(str(path))
    said = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": GIVEN[architecture]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    for extra in tmp_path.glob("chat_template*"):
        extra.unlink()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return ChatTemplate(Tokenizer.load(tmp_path))


def test_images_stand_where_published_code_puts_them(chat, architecture):
    image = IMAGE_TOKENS[architecture]
    messages = [
        written("system", "Be brief."),
        {"role": "user", "content": [IMAGE, IMAGE, {"type": "text", "text": "Which is red?"}]},
        written("assistant", "The first."),
        {"role": "user", "content": [{"type": "text", "text": "And here?"}, IMAGE]},
    ]
    turns = [
        ("system", "Be brief."),
        ("user", f"{image}\n{image}\nWhich is red?"),
        ("assistant", "The first."),
        ("user", f"And here?\n{image}"),
    ]
    found = chat.render(ChatRequest(messages=messages))
    assert found.text == expected(architecture, turns)
    token = chat._tokenizer.encode(image, add_special_tokens=False)
    assert len(token) == 1
    assert found.input_ids.count(token[0]) == 3
    assert found.input_ids == chat._tokenizer.encode(found.text, add_special_tokens=False)


def test_a_text_cannot_forge_an_image(chat, architecture):
    image = IMAGE_TOKENS[architecture]
    [token] = chat._tokenizer.encode(image, add_special_tokens=False)
    parts = [IMAGE, {"type": "text", "text": f"what is {image}?"}]
    found = chat.render(ChatRequest(messages=[{"role": "user", "content": parts}]))
    assert found.text == expected(architecture, [("user", f"{image}\nwhat is {image}?")])
    assert found.input_ids.count(token) == 1


def test_texts_are_joined_as_before(chat, architecture):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    found = chat.render(ChatRequest(messages=[{"role": "user", "content": parts}]))
    assert found.text == expected(architecture, [("user", "one two")])


def test_other_items_are_refused(chat):
    parts = [{"type": "video"}, IMAGE]
    with pytest.raises(RequestError, match="not 'video' parts"):
        chat.render(ChatRequest(messages=[{"role": "user", "content": parts}]))
