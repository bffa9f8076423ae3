"""A model whose encoder reads the prompt, served whole: texts in, what transformers writes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sylvan import Engine
from sylvan.protocol.errors import RequestError
from tests.parity.reading import START, pair

FLAGS = {"device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 4096}
NEW = 10
PARAMS = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
TEXTS = ("w5 w9 w20 w31", "w7 w7 w8", "w100 w3 w50 w51 w52 w53")


class Translator:
    """A checkpoint, what transformers makes of it, and an engine that serves it."""

    def __init__(self, folder: Path) -> None:
        self._model = pair("bart-pair", folder).inner
        (folder / "generation_config.json").write_text(
            json.dumps({"decoder_start_token_id": START, "forced_bos_token_id": 9})
        )
        self.engine = Engine(model_path=str(folder), processes="one", **FLAGS)

    def expected(self, text: str, begins: tuple[int, ...] = (9,)) -> list[int]:
        read = torch.tensor([self.engine.tokenizer.encode(text)])
        ids = [START, *begins]
        for _ in range(NEW):
            with torch.inference_mode():
                logits = self._model(
                    input_ids=read, decoder_input_ids=torch.tensor([ids]), use_cache=False
                ).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids[-NEW:]


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    made = Translator(tmp_path_factory.mktemp("translator"))
    yield made
    made.engine.shutdown()


def test_texts_are_encoded_and_answered(translator):
    engine = translator.engine
    expected = [translator.expected(text) for text in TEXTS]

    together = engine.generate(list(TEXTS), PARAMS)
    alone = [engine.generate(text, PARAMS) for text in TEXTS]
    *_, streamed = engine.generate(TEXTS[0], PARAMS, stream=True)

    assert [reply["output_ids"] for reply in together] == expected
    assert [reply["output_ids"] for reply in alone] == expected
    assert streamed["output_ids"] == expected[0]
    for text, reply in zip(TEXTS, alone, strict=True):
        read = len(engine.tokenizer.encode(text))
        assert reply["meta_info"]["prompt_tokens"] == read + 2  # and what the decoder starts with


@pytest.mark.parametrize("begins", ["w40 w41", [44, 45]])
def test_an_answer_begins_as_asked(translator, begins):
    expected = translator.expected(TEXTS[0], (44, 45))

    reply = translator.engine.generate(TEXTS[0], PARAMS, decoder_prompt=begins)

    assert reply["output_ids"] == expected
    assert expected != translator.expected(TEXTS[0])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_ids": [4] * 257}, "input_ids"),
        ({"input_ids": [5], "decoder_prompt": [199]}, "decoder_prompt"),
        ({"input_ids": [5], "decoder_prompt": [4] * 255}, "decoder_prompt"),
        ({"input_ids": [199]}, "input_ids"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(translator, body, param):
    with pytest.raises(RequestError) as refused:
        translator.engine.generate(sampling_params=PARAMS | {"max_new_tokens": 1}, **body)

    assert refused.value.status == 400
    assert refused.value.param == param
    assert translator.engine.generate(TEXTS[0], PARAMS)["output_ids"]
