"""A real server that hears: Whisper on `/v1/audio`, its windows, forms of replies, bad input."""

from __future__ import annotations

import base64
import json

import httpx
import numpy as np
import pytest
import torch
import transformers

from sylvan.media.container import sound_samples
from sylvan.media.messages import PrepareItem
from sylvan.media.processor import Processor
from sylvan.text.tokenizer import Tokenizer
from sylvan.text.whisper import WhisperTokens
from tests.e2e.conftest import running
from tests.support.cluster import gateway
from tests.support.media_files import mp4, wav
from tests.support.multimodal import IMAGE, write_served
from tests.support.processors import HEARS, Files, write_files

pytestmark = pytest.mark.slow  # encoders give way to all other work

TIMES = tuple(f"<|{n * 0.02:.2f}|>" for n in range(12))
TOKENS = (
    *("<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startofprev|>", "<|notimestamps|>", *TIMES),
)
START = 263


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hears")
    extractor = HEARS | {"chunk_length": 30, "processor_class": "WhisperProcessor"}
    write_files(Files(extractor, {}, TOKENS, {}), folder)
    torch.manual_seed(5)
    config = transformers.WhisperConfig(
        vocab_size=300,
        d_model=32,
        decoder_ffn_dim=48,
        encoder_ffn_dim=48,
        decoder_layers=2,
        encoder_layers=1,
        decoder_attention_heads=2,
        encoder_attention_heads=2,
        num_mel_bins=16,
        max_source_positions=1500,
        max_target_positions=48,
        decoder_start_token_id=START,
        bos_token_id=1,
        eos_token_id=258,
        pad_token_id=256,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    flags = ["--dtype", "float32", "--media.seconds", "100"]
    with running(str(folder), *flags) as made, httpx.Client(base_url=made.url, timeout=180) as http:
        yield http


@pytest.fixture(scope="module")
def reference(folder):
    """The transcription by transformers of a window of at most 30 s."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    )
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    tokens = WhisperTokens(tokenizer, 48)

    def ids(samples, prompt):
        made = extractor(samples, sampling_rate=16000, return_tensors="pt")
        found = list(prompt)
        while len(found) < 48 and found[-1] != 258:
            with torch.inference_mode():
                logits = model(
                    input_features=made["input_features"], decoder_input_ids=torch.tensor([found])
                ).logits
            found.append(int(logits[0, -1].argmax()))
        return [token for token in found[len(prompt) :] if token != 258]

    def write(data, language="en", task="transcribe"):
        prompt = tokens.prompt(language, task, (), times=False)
        found = ids(sound_samples(data, 16000, 60), prompt)
        spoken, _ = tokens.spoken(found, 30.0)
        return "".join(tokenizer.decode(part.ids) for part in spoken).strip()

    return write


def ask(server, data, path="transcriptions", **fields):
    form = {"model": "m", "language": "en"} | fields
    files = {"file": ("a.wav", data, "audio/wav")}
    return server.post(f"/v1/audio/{path}", data=form, files=files)


def test_texts_equal_transformers(server, reference):
    for seed, fields in ((440, {}), (700, {"language": "de"}), (300, {"path": "translations"})):
        data = wav(0.6, hertz=seed)
        task = "translate" if "path" in fields else "transcribe"
        expected = reference(data, fields.get("language", "en"), task)
        for _ in range(2):  # cold and warm
            response = ask(server, data, **fields)
            assert response.status_code == 200, response.text
            assert response.json() == {
                "text": expected,
                "usage": {"type": "duration", "seconds": 1},
            }
    text = ask(server, wav(0.6), response_format="text")
    assert text.text == reference(wav(0.6)) + "\n"
    video = ask(server, mp4())
    assert video.status_code == 400
    assert "no audio track" in video.json()["error"]["message"]


def test_a_language_is_found_out(server):
    found = ask(server, wav(0.6), language="", response_format="verbose_json").json()
    assert found["language"] in ("en", "de")
    said = ask(server, wav(0.6), language=found["language"], response_format="verbose_json").json()
    assert said == found


def test_long_sounds_are_heard_in_windows(server):
    data = wav(31.0)
    whole = ask(server, data, response_format="verbose_json").json()
    assert whole["duration"] == 31.0
    assert len(whole["segments"]) >= 2
    starts = [segment["start"] for segment in whole["segments"]]
    assert starts == sorted(starts)
    assert all(s["end"] <= 31.0 for s in whole["segments"])
    subtitles = ask(server, data, response_format="srt").text
    assert subtitles.startswith("1\n00:00:0")
    assert subtitles.count(" --> ") == len(whole["segments"])
    assert ask(server, data, response_format="vtt").text.startswith("WEBVTT\n\n00:00:0")


def test_words_have_times(server):
    data = wav(31.0)
    form = {"response_format": "verbose_json"}
    plain = ask(server, data, **form).json()
    both = ask(server, data, **form, **{"timestamp_granularities[]": ["word", "segment"]}).json()
    words = both.pop("words")
    assert both == plain
    assert "".join("".join(w["word"] for w in words).split()) == "".join(both["text"].split())
    times = [time for word in words for time in (word["start"], word["end"])]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= 31.0
    alone = ask(server, data, **form, **{"timestamp_granularities[]": "word"}).json()
    assert alone["words"] == words
    assert "segments" not in alone


def test_streamed_equals_whole(server):
    data = wav(31.0)
    whole = ask(server, data).json()["text"]
    with server.stream(
        "POST",
        "/v1/audio/transcriptions",
        data={"model": "m", "language": "en", "stream": "true"},
        files={"file": ("a.wav", data, "audio/wav")},
    ) as stream:
        lines = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert "".join(x["delta"] for x in lines if x["type"] == "transcript.text.delta") == whole
    assert lines[-1]["type"] == "transcript.text.done"
    assert lines[-1]["text"] == whole


@pytest.mark.parametrize(
    ("data", "fields", "param"),
    [
        (b"no sound", {}, "file"),
        (b"", {}, "file"),
        (wav(101.0, 8000), {}, "file"),
        (wav(0.5), {"language": "xx"}, "language"),
        (wav(0.5), {"response_format": "mp3"}, "response_format"),
        (wav(0.5), {"temperature": "hot"}, "temperature"),
        (wav(0.5), {"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        (
            wav(0.5),
            {"timestamp_granularities[]": "letter", "response_format": "verbose_json"},
            "timestamp_granularities",
        ),
        (wav(0.5), {"response_format": "srt", "stream": "true"}, "stream"),
    ],
)
def test_bad_calls_are_refused(server, data, fields, param):
    response = ask(server, data, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert ask(server, wav(0.5)).status_code == 200


async def test_a_gateway_passes_sounds_on(server):
    """Byte for byte: whole, streamed, and refused."""
    data = wav(0.6)
    wanted = [
        ("transcriptions", {}),
        ("translations", {"response_format": "verbose_json"}),
        ("transcriptions", {"stream": "true"}),
        ("transcriptions", {"response_format": "srt"}),
        ("transcriptions", {"response_format": "mp3"}),
    ]
    async with gateway(str(server.base_url)) as front:
        for path, fields in wanted:
            files = {"file": ("a.wav", data, "audio/wav")}
            form = {"model": "m", "language": "en"} | fields
            found = await front.http.post(f"/v1/audio/{path}", data=form, files=files)
            direct = ask(server, data, path, **fields)
            assert (found.status_code, found.content) == (direct.status_code, direct.content)
            assert found.headers["content-type"] == direct.headers["content-type"]
        for body, kind in ((b"{}", "application/json"), (b"x", "multipart/form-data; boundary=b")):
            refused = await front.http.post(
                "/v1/audio/transcriptions", content=body, headers={"content-type": kind}
            )
            assert refused.status_code == 400, refused.text


def test_a_model_of_chats_hears(tmp_path):
    folder = write_served("qwen2-audio", tmp_path)
    data = wav(0.8)
    url = base64.b64encode(data).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{url}"}},
        {"type": "text", "text": "what?"},
    ]
    model = transformers.AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)
    made = Processor(folder).prepare(PrepareItem(id=1, kind="audio", data=data, max_pixels=1))
    with (
        running(str(folder), "--dtype", "float32") as server,
        httpx.Client(base_url=server.url, timeout=180) as http,
    ):
        body = {
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        ids = http.post("/v1/chat/render", json=body).json()["input_ids"]
        reply = http.post("/v1/chat/completions", json=body).json()
        usage = reply["usage"]["prompt_tokens_details"]
        assert usage["audio_tokens"] == 2 * len(made.tokens)
        whole = [t for token in ids for t in (made.tokens if token == IMAGE else (token,))]
        inputs = torch.tensor([whole])
        features = {name: torch.from_numpy(np.repeat(x, 2, 0)) for name, x in made.features.items()}
        with torch.inference_mode():
            found = model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
                **features,
            )
        assert reply["choices"][0]["response_token_ids"] == found[0, len(whole) :].tolist()
        said = ask(http, data, response_format="verbose_json")
        assert said.status_code == 200, said.text
        assert [s["end"] for s in said.json()["segments"]] == [0.8]
        assert http.get("/model_info").json()["has_audio_understanding"] is True
