"""Prompts of ColPali, ColQwen2 and ColModernVBERT are those of transformers' processors."""

from __future__ import annotations

import json

import pytest
import transformers
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from sylvan.runtime.serving.retrieval import read_retrieval
from sylvan.text.tokenizer import Tokenizer
from tests.support.processors import PROCESSORS, write_files
from tests.support.scripted import write_checkpoint

QUERY = "what <image> costs <|im_start|>?"
PLAIN = "what does it cost?"


def with_tokens(folder, tokens, **settings):
    write_checkpoint(folder)
    path = folder / "tokenizer.json"
    backend = Backend.from_file(str(path))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    backend.save(str(path))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def colpali(tmp_path):
    with_tokens(
        tmp_path,
        ("<image>", "<bos>", "<eos>", "<pad>"),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    image = theirs.convert_tokens_to_ids("<image>")
    return tmp_path, theirs, image


def test_colpali(colpali):
    folder, theirs, image = colpali
    prompts = read_retrieval(str(folder), "ColPaliForRetrieval")
    mine = Tokenizer.load(folder)
    query = f"<bos>Question: {PLAIN}{'<pad>' * 10}\n"
    assert prompts.of_query(PLAIN, mine) == theirs(query, add_special_tokens=False)["input_ids"]
    page = "<image><bos>Describe the image.\n"
    assert prompts.of_page(image, mine) == theirs(page, add_special_tokens=False)["input_ids"]


def test_colqwen2_says_what_is_around(tmp_path):
    write_files(PROCESSORS["qwen2-vl"], tmp_path)
    (tmp_path / "processor_config.json").write_text('{"query_prefix": "Find: "}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    mine = Tokenizer.load(tmp_path)
    prompts = read_retrieval(str(tmp_path), "ColQwen2ForRetrieval")
    query = f"Find: {PLAIN}{'<|endoftext|>' * 10}\n"
    assert prompts.of_query(PLAIN, mine) == theirs(query, add_special_tokens=False)["input_ids"]
    page = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
        "<|im_end|><|endoftext|>"
    )
    image = mine.token_id("<|image_pad|>")
    found = prompts.of_page(image, mine)
    assert found == theirs(page, add_special_tokens=False)["input_ids"]
    assert found.count(image) == 1


def test_colmodernvbert_has_the_special_tokens_of_its_tokenizer(tmp_path):
    names = ("<image>", "[CLS]", "[SEP]", "<|begin_of_text|>", "<end_of_utterance>")
    with_tokens(tmp_path, names, cls_token="[CLS]", sep_token="[SEP]")
    path = tmp_path / "tokenizer.json"
    backend = Backend.from_file(str(path))
    ends = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    backend.save(str(path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    mine = Tokenizer.load(tmp_path)
    prompts = read_retrieval(str(tmp_path), "ColModernVBertForRetrieval")
    query = f"{PLAIN}{'<end_of_utterance>' * 10}"
    assert prompts.of_query(PLAIN, mine) == theirs(query)["input_ids"]
    page = "<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:"
    found = prompts.of_page(mine.token_id("<image>"), mine)
    assert found == theirs(page)["input_ids"]
    assert (
        mine.token_id("<end_of_utterance>")
        not in prompts.of_query("<end_of_utterance>", mine)[:-11]
    )


def test_queries_yield_no_control_tokens(colpali):
    folder, _, image = colpali
    prompts = read_retrieval(str(folder), "ColPaliForRetrieval")
    mine = Tokenizer.load(folder)
    assert image not in prompts.of_query(QUERY, mine)
    assert mine.token_id("<|im_start|>") not in prompts.of_query(QUERY, mine)


def test_other_models_have_none(tmp_path):
    assert read_retrieval(str(tmp_path), "Qwen2Model") is None
