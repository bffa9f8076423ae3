"""A real server that sees: all APIs, real processes that prepare images, real failures."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import sylvan
from sylvan.lang.chat_templates import get_chat_template
from sylvan.lang.media import encode_video
from sylvan.media.messages import PrepareItem
from sylvan.media.processor import Processor
from sylvan.runtime.features.multimodal.transformers_encoder import TransformersEncoder
from tests.e2e.conftest import running
from tests.support.media_files import mp4
from tests.support.multimodal import IMAGE, VIDEO, write_served

pytestmark = pytest.mark.slow  # encoders give way to all other work

NEW = 12


def png(seed: int, height: int = 40, width: int = 60) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def part(data: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text_of(data)}"}}


def said(text: str) -> dict:
    return {"type": "text", "text": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_served("qwen2-vl", tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def server(folder):
    flags = ["--dtype", "float32", "--media.item-bytes", "100KB", "--media.items", "3"]
    flags += ["--media.pixels", "250000", "--media.seconds", "10"]
    with running(str(folder), *flags) as made, httpx.Client(base_url=made.url, timeout=180) as http:
        yield http


@pytest.fixture(scope="module")
def reference(folder):
    """The answer of transformers to a prompt with a placeholder for each image."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = Processor(folder)

    def answer(ids, images, videos=()):
        given = [("image", IMAGE, data) for data in images]
        given += [("video", VIDEO, data) for data in videos]
        left: dict[int, list] = {IMAGE: [], VIDEO: []}
        features: dict[str, torch.Tensor] = {}
        for kind, token, data in given:
            made = processor.prepare(PrepareItem(id=0, kind=kind, data=data, max_pixels=1 << 22))
            left[token].append(made.tokens)
            for name, array in made.features.items():
                parts = [features[name]] if name in features else []
                features[name] = torch.cat([*parts, torch.from_numpy(array)])
        whole = [t for token in ids for t in (left[token].pop(0) if token in left else (token,))]
        inputs = torch.tensor([whole])
        found = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            mm_token_type_ids=(inputs == IMAGE).int() + 2 * (inputs == VIDEO).int(),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            **features,
        )
        return found[0, len(whole) :].tolist()

    return answer


def chat(server, content, **more):
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return server.post("/v1/chat/completions", json=body | more)


def tokens(response) -> list[int]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["response_token_ids"]


def test_answers_equal_transformers_cold_and_warm(server, reference):
    for images in ([png(1)], [png(2), png(3, 80, 30)]):
        content = [x for image in images for x in (part(image), said("and "))]
        messages = [{"role": "user", "content": content}]
        ids = server.post("/v1/chat/render", json={"messages": messages}).json()["input_ids"]
        expected = reference(ids, images)
        assert tokens(chat(server, content)) == expected
        assert tokens(chat(server, content)) == expected
    usage = chat(server, content).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 64
    assert 32 < usage["prompt_tokens_details"]["image_tokens"] < usage["prompt_tokens"]


def test_streams_and_samples_of_an_image(server):
    content = [part(png(4)), said("what?")]
    alone = chat(server, content).json()["choices"][0]["message"]["content"]
    several = chat(server, content, n=3).json()["choices"]
    assert [choice["message"]["content"] for choice in several] == [alone] * 3
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": NEW}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    with server.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    pieces = [c["delta"].get("content") or "" for x in lines for c in json.loads(x)["choices"]]
    assert "".join(pieces) == alone


def test_all_apis_take_images(server):
    data = text_of(png(5))
    source = {"type": "base64", "media_type": "image/png", "data": data}
    calls = {
        "/v1/messages": {
            "model": "m",
            "max_tokens": 4,
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": source}, said("what?")]}
            ],
        },
        "/v1/responses": {
            "max_output_tokens": 4,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
                        {"type": "input_text", "text": "what?"},
                    ],
                }
            ],
        },
        "/api/chat": {
            "model": "m",
            "stream": False,
            "messages": [{"role": "user", "content": "what?", "images": [data]}],
            "options": {"num_predict": 4},
        },
        "/api/generate": {
            "model": "m",
            "stream": False,
            "prompt": "what?",
            "images": [data],
            "options": {"num_predict": 4},
        },
        "/generate": {
            "text": "<|vision_start|><|image_pad|><|vision_end|>what?",
            "image_data": data,
            "sampling_params": {"max_new_tokens": 4},
        },
    }
    for path, body in calls.items():
        response = server.post(path, json=body)
        assert response.status_code == 200, (path, response.text)
    batch = {
        "text": ["<|image_pad|>a", "plain", "<|image_pad|><|image_pad|>b"],
        "image_data": [data, None, [data, data]],
        "sampling_params": {"max_new_tokens": 2},
    }
    replies = [reply["meta_info"] for reply in server.post("/generate", json=batch).json()]
    counts = [meta["prompt_tokens"] for meta in replies]
    assert [meta.get("image_tokens", 0) for meta in replies] == [40, 0, 80]
    assert counts[0] == 41
    assert counts[1] == 5
    assert counts[2] == 81
    info = server.get("/model_info").json()
    assert (info["has_image_understanding"], info["has_audio_understanding"]) == (True, False)


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        ([part(b"no image")], 400, "the image cannot be decoded"),
        ([part(png(1)[:60])], 400, "the image cannot be decoded"),
        ([part(b"")], 400, "empty"),
        ([part(os.urandom(110_000))], 413, "media.item_bytes"),
        ([part(png(1))] * 4, 400, "media.items"),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}], 400, "media.fetch"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], 400, "allowed_dirs"),
        ([{"type": "image_url", "image_url": {}}], 400, "image_url.url"),
        ([{"type": "image_url"}], 400, "image_url"),
        ([{"type": "hologram"}], 400, "hologram"),
    ],
)
def test_bad_items_are_refused_by_their_place(server, content, status, words):
    before = tokens(chat(server, "plain"))
    response = chat(server, [said("look: "), *content])
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"].startswith("messages[0].content[1]")
    assert tokens(chat(server, "plain")) == before


def test_placeholders_and_items_must_agree(server):
    data = text_of(png(6))
    for text, items in (("nothing", data), ("<|image_pad|><|image_pad|>", data)):
        body = {"text": text, "image_data": items, "sampling_params": {"max_new_tokens": 2}}
        response = server.post("/generate", json=body)
        assert response.status_code == 400
        assert "placeholders" in response.json()["error"]["message"]


def test_vectors_take_the_place_of_an_image(server, folder):
    made = Processor(folder).prepare(
        PrepareItem(id=0, kind="image", data=png(10), max_pixels=1 << 22)
    )
    with torch.inference_mode():
        [vectors] = TransformersEncoder(folder, torch.float32).encode("image", made.features)
    sampling = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    body = {"text": "<|image_pad|>what?", "sampling_params": sampling}
    expected = server.post("/generate", json=body | {"image_data": text_of(png(10))}).json()
    item = {
        "format": "precomputed_embedding",
        "feature": text_of(vectors.numpy().astype("<f4").tobytes()),
        "shape": list(vectors.shape),
        "grid": list(made.grid),
    }
    reply = server.post("/generate", json=body | {"image_data": item})
    assert reply.status_code == 200, reply.text
    assert reply.json()["output_ids"] == expected["output_ids"]
    narrow = item | {"shape": [2 * len(vectors), vectors.shape[1] // 2], "grid": None}
    refused = server.post("/generate", json=body | {"image_data": narrow})
    assert refused.status_code == 400
    assert "32 numbers, not 64" in refused.json()["error"]["message"]


def clip(data: bytes, **more) -> dict:
    url = f"data:video/mp4;base64,{text_of(data)}"
    return {"type": "video_url", "video_url": {"url": url} | more}


def test_videos_are_looked_at(server, reference):
    data = mp4()
    content = [clip(data), part(png(9)), said("what?")]
    messages = [{"role": "user", "content": content}]
    ids = server.post("/v1/chat/render", json={"messages": messages}).json()["input_ids"]
    cold = chat(server, content)
    assert tokens(cold) == reference(ids, [png(9)], [data])
    assert tokens(chat(server, content)) == tokens(cold)
    usage = cold.json()["usage"]["prompt_tokens_details"]
    fewer = chat(server, [clip(data, max_frames=2), part(png(9)), said("what?")]).json()["usage"]
    assert fewer["prompt_tokens_details"]["image_tokens"] == usage["image_tokens"]
    assert 0 < fewer["prompt_tokens_details"]["video_tokens"] < usage["video_tokens"]
    body = {
        "text": "<|video_pad|> and <|image_pad|>",
        "image_data": text_of(png(9)),
        "video_data": text_of(data),
        "sampling_params": {"max_new_tokens": 2},
    }
    reply = server.post("/generate", json=body).json()["meta_info"]
    assert reply["video_tokens"] == usage["video_tokens"]


@pytest.mark.parametrize(
    ("video", "words"),
    [
        (clip(b"no video"), "the video cannot be decoded"),
        (clip(mp4()[:300]), "video_url.url"),
        (clip(mp4(2, 6, 640, 480)), "media.pixels"),
        (clip(mp4(120, 6, 16, 16)), "media.seconds"),
        (clip(mp4(), fps=0), "fps"),
        (clip(mp4(), max_frames="many"), "max_frames"),
    ],
)
def test_bad_videos_are_refused_by_their_place(server, video, words):
    response = chat(server, [video])
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"].startswith("messages[0].content[0].video_url")
    assert chat(server, "plain").status_code == 200


def test_a_lost_preparing_process_costs_its_item_only(server, folder):
    chat(server, [part(png(7)), said("x")])
    workers = _children_of("sylvan.media.worker", str(folder))
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    statuses = []
    while time.monotonic() < deadline:
        statuses.append(chat(server, [part(png(len(statuses) + 100)), said("x")]).status_code)
        if statuses[-1] == 200:
            break
    assert statuses[-1] == 200
    assert len(statuses) <= 2  # the one that found it dead, and the next


def _children_of(program: str, argument: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    words = file.read().decode(errors="replace").split("\0")
            except OSError:
                continue
            if program in words and argument in words:
                found.append(int(name))
    return found


def test_the_engine_and_the_frontend_see_what_the_server_sees(server, folder, tmp_path):
    data = png(8)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    prompt = "<|vision_start|><|image_pad|><|vision_end|>what?"
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    body = {"text": prompt, "image_data": text_of(data), "sampling_params": sampling}
    expected = server.post("/generate", json=body).json()["text"]
    with sylvan.Engine(model_path=str(folder), dtype="float32", log_level="warning") as engine:
        for item in (data, str(path), path, Image.open(path), text_of(data), [data]):
            assert engine.generate(prompt, sampling, image_data=item)["text"] == expected
        both = engine.generate([prompt, "none"], sampling, image_data=[data, None])
        assert both[0]["text"] == expected
        with pytest.raises(ValueError, match="image_data"):
            engine.generate(prompt, sampling, image_data=b"no image")

    @sylvan.function
    def look(s):
        s += sylvan.image(str(path)) + "what?"
        s += sylvan.gen("answer", max_tokens=6, temperature=0, ignore_eos=True)

    backend = sylvan.RuntimeEndpoint(str(server.base_url).rstrip("/"))
    backend.chat_template = get_chat_template("qwen2-vl")
    state = look.run(backend=backend)
    assert state["answer"] == expected

    clip = tmp_path / "a.mp4"
    clip.write_bytes(mp4())

    @sylvan.function
    def watch(s):
        s += sylvan.video(str(clip), 4) + "what?"
        s += sylvan.gen("answer", max_tokens=6, temperature=0, ignore_eos=True)

    frames = encode_video(str(clip), 4)
    prompt = prompt.replace("image_pad", "video_pad")
    body = {"text": prompt, "video_data": frames, "sampling_params": sampling}
    expected = server.post("/generate", json=body).json()["text"]
    assert watch.run(backend=backend)["answer"] == expected


def test_a_load_test_with_pictures(server, tmp_path):
    file = tmp_path / "runs.jsonl"
    words = (
        *("bench", "serve", "--url", str(server.base_url), "--api", "chat"),
        *("--dataset-name", "image", "--image-resolution", "40x60", "--image-count", "2"),
        *("--requests", "4", "--input-tokens", "8", "--output-tokens", "3"),
        *(
            "--random-range-ratio",
            "1",
            "--warmup-requests",
            "0",
            "--output",
            str(file),
            "--output-details",
        ),
    )
    command = [sys.executable, "-c", "import sys; from sylvan.cli import main; sys.exit(main())"]

    done = subprocess.run(
        [*command, *words], check=False, capture_output=True, text=True, timeout=180
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert (found["completed"], found["failed"], found["dataset_name"]) == (4, 0, "image")
    content = [part(png(1)), part(png(2)), said("x" * 8)]
    counted = chat(server, content).json()["usage"]["prompt_tokens"]
    assert set(found["input_lens"]) == {counted}  # each picture is counted in tokens
    assert found["total_cached_tokens"] < counted  # and is another one


def test_metrics_tell_what_is_encoded(server):
    def told(name):
        lines = server.get("/metrics").text.splitlines()
        found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{")]
        assert found, name
        return sum(found)

    def asked():
        return told("sglang:encoder_cache_total_files_total")

    newest = -1.0
    while newest != (newest := asked()):
        time.sleep(1.5)  # until heartbeats have reported the requests of other tests
    before = newest, told("sglang:encoder_cache_hit_files_total")
    image = png(77)
    for text in ("one", "two"):  # after the image, so that the prefix cache does not have it
        chat(server, [said(text), part(image)])

    deadline = time.monotonic() + 60
    while asked() < before[0] + 2 and time.monotonic() < deadline:
        time.sleep(0.1)  # heartbeats tell
    assert asked() == before[0] + 2
    assert told("sglang:encoder_cache_hit_files_total") == before[1] + 1
    assert told("sglang:encoder_cache_entries") >= 1
    assert told("sglang:encoder_cache_size_mb") > 0
