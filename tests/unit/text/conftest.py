"""Small tokenizers of the usual kinds, trained here, written as checkpoint directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, how are you today?",
    "def f(x): return x + 1  # user system assistant tool think",
    "Gruesse aus Muenchen: \u00e4\u00f6\u00fc\u00df. \u4f60\u597d\uff0c\u4e16\u754c \U0001f600",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    "im_start im_end <|im start|> [INST] eot id header end of turn",
] * 4

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML_PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]


def byte_level(special: list[str], plain: list[str] = (), bos: str | None = None) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tok.train_from_iterator(CORPUS, trainer)
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    if bos:
        tok.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tok.token_to_id(bos))]
        )
    return tok


def sentencepiece_bpe(special: list[str], bos: str = "<s>", *, llama: bool = True) -> Tokenizer:
    """As Llama 2 (`llama`): prepended U+2581, first space stripped; else as Gemma."""
    tok = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    base = ["<unk>", "<s>", "</s>"]
    if llama:
        tok.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        tok.normalizer = normalizers.Replace(" ", "\u2581")
        tok.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tok.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if llama else [])])
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*base, *(f"<0x{i:02X}>" for i in range(256))],
        limit_alphabet=90,
        show_progress=False,
    )
    tok.train_from_iterator([word for line in CORPUS for word in line.split("  ")], trainer)
    data = json.loads(tok.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] in base]
    tok = Tokenizer.from_str(json.dumps(data))
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tok.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tok.token_to_id(bos))]
    )
    return tok


def unigram() -> Tokenizer:
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tok.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def save(tok: Tokenizer, folder: Path, template: str | None = None, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    if template is not None:
        config["chat_template"] = template
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


BUILDERS = {
    "byte_level": lambda: byte_level(CHATML, CHATML_PLAIN),
    "byte_level_bos": lambda: byte_level(
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        bos="<|begin_of_text|>",
    ),
    "llama2": lambda: sentencepiece_bpe(["[INST]", "[/INST]"]),
    "gemma": lambda: sentencepiece_bpe(["<start_of_turn>", "<end_of_turn>"], llama=False),
    "unigram": unigram,
}


@pytest.fixture(scope="session")
def built() -> dict[str, Tokenizer]:
    return {name: build() for name, build in BUILDERS.items()}


@pytest.fixture(scope="session", params=sorted(BUILDERS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def folders(
    built: dict[str, Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    bos = {"byte_level_bos": "<|begin_of_text|>", "llama2": "<s>", "gemma": "<s>", "unigram": "<s>"}
    eos = {"byte_level": "<|im_end|>", "byte_level_bos": "<|eot_id|>"}
    folders = {}
    for name, tok in built.items():
        config = {"eos_token": eos.get(name, "</s>")}
        if name in bos:
            config["bos_token"] = bos[name]
        template = "<tool_call></think><think></tool_call>" if name == "byte_level" else None
        folders[name] = save(tok, root / name, template, **config)
    return folders
