"""CLIP and SigLIP: vectors of texts and images equal those of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from sylvan.config.media import MediaConfig
from sylvan.media.processor import digest_of
from sylvan.protocol.media import APART_TOKEN, MediaItem
from sylvan.protocol.requests import EmbedRequest
from sylvan.runtime.features.multimodal.build import media_control, media_worker
from sylvan.runtime.models.pooling import PoolingOverride
from sylvan.runtime.models.registry import load_config
from tests.parity.checkpoints import SHAPE, VOCAB, write
from tests.parity.serving import Serving
from tests.parity.vectors import serve

TEXT = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 16}
EYES |= {"num_attention_heads": 2, "patch_size": 8}


def _texts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [[1, *rng.integers(4, VOCAB - 1, n).tolist(), VOCAB - 1] for n in (40, 3, 17)]


@pytest.fixture(params=["whole", "text"])
def clip(request, tmp_path):
    """A checkpoint, and what transformers makes of ids."""
    text = TEXT | {"eos_token_id": VOCAB - 1}
    if request.param == "text":
        config = transformers.CLIPTextConfig(**text, projection_dim=24)
        auto = SimpleNamespace(from_config=transformers.CLIPTextModelWithProjection._from_config)
        model = write(config, 5, tmp_path, auto=auto)
        return tmp_path, lambda ids: model(ids).text_embeds[0]
    config = transformers.CLIPConfig(text_config=text, vision_config=EYES, projection_dim=24)
    model = write(config, 5, tmp_path, auto=transformers.AutoModel)

    def features(ids: torch.Tensor) -> torch.Tensor:
        found = model.get_text_features(ids)
        return (found if isinstance(found, torch.Tensor) else found.pooler_output)[0]

    return tmp_path, features


def test_texts_equal_those_of_transformers_however_they_are_computed(clip):
    path, features = clip
    serving = serve(path)

    together, again = serving.embed(_texts()), serving.embed(_texts())
    alone = [serve(path).embed([ids])[0] for ids in _texts()]
    chunked = serve(path, chunk_tokens=16, max_batch_tokens=19).embed(_texts())

    for ids, found in zip(_texts(), together, strict=True):
        with torch.inference_mode():
            expected = F.normalize(features(torch.tensor([ids])), dim=-1)
        assert found.shape == (24,)
        assert found == pytest.approx(expected.numpy(), abs=1e-4)
    for others in (again, alone, chunked):
        for one, other in zip(together, others, strict=True):
            assert one == pytest.approx(other, abs=1e-6)


LENGTH = 16  # SigLIP pads texts to it
TOWERS = {
    "clip": lambda: transformers.CLIPConfig(
        text_config=TEXT | {"eos_token_id": VOCAB - 1}, vision_config=EYES, projection_dim=24
    ),
    "siglip": lambda: transformers.SiglipConfig(
        text_config=TEXT | {"max_position_embeddings": LENGTH, "projection_size": 32},
        vision_config=EYES,
    ),
    "siglip2": lambda: transformers.Siglip2Config(
        text_config=TEXT | {"max_position_embeddings": LENGTH, "projection_size": 32},
        vision_config=EYES | {"num_patches": 16},
    ),
}


def _pictures(name: str) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(6)

    def draw(shape):
        return rng.normal(size=shape).astype(np.float32)

    if name != "siglip2":
        return [{"pixel_values": draw((1, 3, 16, 16))} for _ in range(3)]
    found = []
    for height, width in ((4, 4), (2, 5), (3, 1)):  # of any shape, filled up to 16 patches
        count = height * width
        patches = np.zeros((1, 16, 3 * 8 * 8), np.float32)
        patches[:, :count] = draw((1, count, 3 * 8 * 8))
        found.append(
            {
                "pixel_values": patches,
                "pixel_attention_mask": (np.arange(16) < count).astype(np.int32)[None],
                "spatial_shapes": np.array([[height, width]]),
            }
        )
    return found


class Towers:
    """A tiny checkpoint with an encoder for each kind."""

    def __init__(self, name, path) -> None:
        self.path, self.pictures = path, _pictures(name)
        self.model = write(TOWERS[name](), 7, path, auto=transformers.AutoModel)
        [self.control] = media_control(MediaConfig(), load_config(path))
        self.serving = Serving(
            path,
            capabilities=(self.control,),
            workers=(media_worker,),
            options={"embed": PoolingOverride(), "headless": True},
            runner="auto",
            chunk_tokens=32,
        )

    def expected(self, picture) -> np.ndarray:
        given = {name: torch.from_numpy(array) for name, array in picture.items()}
        with torch.inference_mode():
            found = self.model.get_image_features(**given).pooler_output[0]
        return F.normalize(found, dim=-1).numpy()

    def expected_text(self, ids) -> np.ndarray:
        with torch.inference_mode():
            found = self.model.get_text_features(torch.tensor([ids])).pooler_output[0]
        return F.normalize(found, dim=-1).numpy()

    def image(self, rid, index, **more) -> EmbedRequest:
        features = self.pictures[index]
        item = MediaItem(
            kind="image",
            start=0,
            stop=1,
            token_id=APART_TOKEN,
            digest=digest_of("image", features),
            features=features,
        )
        ids = np.array([APART_TOKEN], np.int32)
        return EmbedRequest(rid=rid, input_ids=ids, media=(item,), form="item", **more)

    def run(self, requests) -> dict[str, np.ndarray]:
        for request in requests:
            self.serving.scheduler.add(request)
        self.serving.run()
        found = {request.rid: self.serving.outputs[request.rid][-1] for request in requests}
        assert not [out.finish for out in found.values() if out.finish.type == "abort"]
        return {rid: out.embedding for rid, out in found.items()}


@pytest.mark.parametrize("name", TOWERS)
def test_images_and_texts_share_a_space_as_in_transformers(name, tmp_path):
    towers = Towers(name, tmp_path)
    rng = np.random.default_rng(8)
    ids = rng.integers(4, VOCAB - 1, LENGTH).tolist()
    text = EmbedRequest(rid="text", input_ids=np.array([*ids[:-1], VOCAB - 1], np.int32))
    images = [towers.image(f"i{n}", n) for n in range(3)]

    together = towers.run([text, *images, towers.image("same", 0)])
    again = towers.run([towers.image("again", 1), towers.image("short", 1, dimensions=5)])
    plain = towers.run([towers.image("plain", 2, normalize=False)])

    for n, picture in enumerate(towers.pictures):
        expected = towers.expected(picture)
        assert together[f"i{n}"] == pytest.approx(expected, abs=2e-5)
    expected = towers.expected_text(text.input_ids.tolist())
    assert together["text"] == pytest.approx(expected, abs=1e-4)
    assert together["same"].tobytes() == together["i0"].tobytes()
    assert again["again"].tobytes() == together["i1"].tobytes()
    assert again["short"] == pytest.approx(F.normalize(torch.tensor(together["i1"][:5]), dim=0))
    assert np.linalg.norm(plain["plain"]) != pytest.approx(1)
    assert towers.control.counts.encoded == 3
    towers.serving.close()
