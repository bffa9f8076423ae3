"""Real servers that embed and rank images: CLIP, SigLIP and ColQwen2, as transformers does."""

from __future__ import annotations

import base64
import io
import json

import httpx
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F

from tests.e2e.conftest import running
from tests.support.media_families import TEXT, VIT
from tests.support.multimodal import FAMILIES
from tests.support.processors import PROCESSORS, Files, write_files

QWEN = PROCESSORS["qwen2-vl"]
SQUARE = {"size": {"height": 28, "width": 28}}
END = 258  # <|im_end|>
CUT = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


def png(seed: int, height: int = 40, width: int = 60) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def item(data: bytes) -> dict:
    return {"image": f"data:image/png;base64,{base64.b64encode(data).decode()}"}


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def save(model, files: Files, folder) -> None:
    write_files(files, folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
    model.eval().float().save_pretrained(folder)


def towers(kind: str, folder):
    """A checkpoint; what transformers makes of an image, and of a text."""
    text = TEXT | {"max_position_embeddings": 40, "eos_token_id": END}
    text.pop("num_key_value_heads")
    config = getattr(transformers, f"{kind}Config")
    if kind == "CLIP":
        made = config(text_config=text, vision_config=VIT, projection_dim=24)
        shapes = CUT
    else:
        made = config(text_config=text | {"projection_size": 32}, vision_config=VIT)
        shapes = SQUARE
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}Model")(made)
    types = {"image_processor_type": f"{kind}ImageProcessor", "processor_class": f"{kind}Processor"}
    save(model, Files(types | shapes, {}, (), {}), folder)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", END)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")

    def of_image(data):
        given = images([opened(data)], return_tensors="pt")
        with torch.inference_mode():
            return F.normalize(model.get_image_features(**given).pooler_output[0], dim=-1).numpy()

    def of_text(words):
        padding = {} if kind == "CLIP" else {"padding": "max_length", "max_length": 40}
        words = words if kind == "CLIP" else words.lower()
        ids = tokenizer(words, return_tensors="pt", **padding)["input_ids"]
        with torch.inference_mode():
            found = model.get_text_features(ids)
        return F.normalize(found.pooler_output[0], dim=-1).numpy()

    return of_image, of_text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_texts_and_images_are_embedded_in_one_space(kind, tmp_path):
    of_image, of_text = towers(kind, tmp_path)
    flags = ["--dtype", "float32", "--media.items", "3"]
    with (
        running(str(tmp_path), *flags) as made,
        httpx.Client(base_url=made.url, timeout=180) as http,
    ):
        body = {"input": [item(png(1)), "A Red Cat", item(png(2, 30, 90))]}
        first = http.post("/v1/embeddings", json=body)
        assert first.status_code == 200, first.text
        found = [np.array(one["embedding"]) for one in first.json()["data"]]
        for mine, theirs in zip(
            found, (of_image(png(1)), of_text("A Red Cat"), of_image(png(2, 30, 90))), strict=True
        ):
            assert mine == pytest.approx(theirs, abs=1e-4)
        again = http.post("/v1/embeddings", json=body | {"dimensions": 4})
        assert len(again.json()["data"][0]["embedding"]) == 4
        assert first.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 2
        pages = [png(seed) for seed in (5, 6, 7)]
        rank = {"query": "a red cat", "documents": [item(page) for page in pages]}
        order = [one["index"] for one in http.post("/v1/rerank", json=rank).json()]
        likeness = [float(of_text("a red cat") @ of_image(page)) for page in pages]
        assert order == np.argsort(likeness)[::-1].tolist()
        for bad, param in (
            (item(b"no image"), "input.image"),
            (item(png(1)) | {"text": "both"}, "input.text"),
            (item(png(1)) | {"instruct": "both"}, "input.instruct"),
            ({"image": [item(png(1))["image"]] * 2}, "input"),
            ({"audio": "AAAA"}, "input.audio"),
        ):
            refused = http.post("/v1/embeddings", json={"input": bad})
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == param
        several = {"input": item(png(1)), "return_multivector": True}
        refused = http.post("/v1/embeddings", json=several)
        assert refused.status_code == 400
        assert "a vector of each image" in refused.json()["error"]["message"]
        assert http.post("/v1/embeddings", json={"input": "fine"}).status_code == 200


@pytest.mark.slow
def test_pages_are_found_by_the_vectors_of_their_tokens(tmp_path):
    config = transformers.ColQwen2Config(
        vlm_config=FAMILIES["qwen2-vl"].config().to_dict(), embedding_dim=12
    )
    torch.manual_seed(3)
    model = transformers.ColQwen2ForRetrieval(config)
    kind = {"processor_class": "ColQwen2Processor"}
    save(model, Files(QWEN.images | kind, QWEN.whole, QWEN.tokens, QWEN.names), tmp_path)
    processor = transformers.ColQwen2Processor(
        transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil"),
        transformers.AutoTokenizer.from_pretrained(tmp_path),
    )
    assert json.loads((tmp_path / "config.json").read_text())["architectures"]
    pages = [png(seed, 24, 40) for seed in (1, 2, 3)]
    query = "how much is the fish?"
    with torch.inference_mode():
        given = processor(text=[query], return_tensors="pt")
        asked = model(**given).embeddings[0]
        seen = []
        for page in pages:
            given = processor(images=[opened(page)], return_tensors="pt")
            types = (given["input_ids"] == processor.image_token_id).int()
            places, _ = model.vlm.get_rope_index(
                given["input_ids"], mm_token_type_ids=types, image_grid_thw=given["image_grid_thw"]
            )
            seen.append(model(**given, position_ids=places).embeddings[0])
        scores = processor.score_retrieval([asked], seen)[0]
    with (
        running(str(tmp_path), "--dtype", "float32") as made,
        httpx.Client(base_url=made.url, timeout=180) as http,
    ):
        body = {"input": [query, *(item(page) for page in pages)]}
        reply = http.post("/v1/embeddings", json=body)
        assert reply.status_code == 200, reply.text
        found = [np.array(one["embedding"]) for one in reply.json()["data"]]
        for mine, theirs in zip(found, (asked, *seen), strict=True):
            assert mine.shape == tuple(theirs.shape)
            assert mine == pytest.approx(theirs.numpy(), abs=2e-4)
        rank = {"query": query, "documents": [item(page) for page in pages]}
        ranked = http.post("/v1/rerank", json=rank).json()
        assert [one["index"] for one in ranked] == scores.argsort(descending=True).tolist()
        best = float(scores.max()) / len(asked)  # the mean of its tokens
        assert ranked[0]["score"] == pytest.approx(best, abs=1e-3)
        late = http.post("/v1/embeddings", json={"input": ["a", "b"], "late_chunking": True})
        assert late.status_code == 400
