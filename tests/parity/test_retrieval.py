"""Vectors of all tokens of pages and queries equal those of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from sylvan.config.media import MediaConfig
from sylvan.media.processor import digest_of
from sylvan.protocol.media import MediaItem
from sylvan.protocol.requests import EmbedRequest
from sylvan.runtime.features.multimodal.build import media_control, media_worker
from sylvan.runtime.models.pooling import PoolingOverride
from sylvan.runtime.models.registry import load_config
from tests.parity.serving import Serving
from tests.support.media_families import IMAGE, VIT, Family, image
from tests.support.multimodal import FAMILIES

FAR = 5e-5  # of vectors of length 1
KINDS = {
    "colmodernvbert": ("ColModernVBert", None),
    "colpali": ("ColPali", "paligemma"),
    "colqwen2": ("ColQwen2", "qwen2-vl"),
}


def _modernvbert() -> transformers.PreTrainedConfig:
    return transformers.ModernVBertConfig(
        text_config={
            "model_type": "modernbert",
            "vocab_size": 272,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "local_attention": 8,
            "global_attn_every_n_layers": 3,
            "pad_token_id": 0,
        },
        vision_config=VIT | {"model_type": "siglip_vision_model"},
        image_token_id=IMAGE,
        pixel_shuffle_factor=2,
    )


MODERN = Family(config=_modernvbert, draw=image(1, 2, 3, 28, 28))  # two parts of 2 x 2 vectors


class Pages:
    """A tiny checkpoint, two pages and a query."""

    def __init__(self, name, folder) -> None:
        kind, inside = KINDS[name]
        self.name, self.folder, self.family = name, folder, FAMILIES[inside] if inside else MODERN
        config = getattr(transformers, f"{kind}Config")(
            vlm_config=self.family.config().to_dict(), embedding_dim=12
        )
        torch.manual_seed(5)
        self.model = getattr(transformers, f"{kind}ForRetrieval")(config).eval().float()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.12)
        self.model.save_pretrained(folder)
        self.config = load_config(folder)
        rng = np.random.default_rng(3)
        self.prompts = [([7, 8, 9, 10, 11, 0, 0], None)]
        for _ in range(2):
            features = self.family.draw(rng)
            grid = features.get("image_grid_thw")
            count = 16 if grid is None else int(grid.prod()) // 4
            count = 8 if name == "colmodernvbert" else count
            before, after = ([], [1, 5, 6]) if grid is None else ([3, 4, 5], [6, 8])
            self.prompts.append(([*before, *[IMAGE] * count, *after], features))

    def expected(self, index) -> np.ndarray:
        ids, features = self.prompts[index]
        inputs = torch.tensor([ids])
        given = {name: torch.from_numpy(array) for name, array in (features or {}).items()}
        if self.name == "colpali":
            given["token_type_ids"] = torch.zeros_like(inputs)
        elif (
            self.name == "colqwen2" and features is not None
        ):  # transformers pads pages to the largest one
            given["pixel_values"] = given["pixel_values"][None]
            types = (inputs == IMAGE).int()
            grid = given["image_grid_thw"]
            given["position_ids"], _ = self.model.vlm.get_rope_index(
                inputs, mm_token_type_ids=types, image_grid_thw=grid
            )
        with torch.inference_mode():
            return self.model(input_ids=inputs, **given).embeddings[0].numpy()

    def request(self, rid, index) -> EmbedRequest:
        ids, features = self.prompts[index]
        media = ()
        if features is not None:
            start, grid = ids.index(IMAGE), features.get("image_grid_thw")
            sides = None
            if grid is not None:
                time, height, width = (int(n) for n in grid[0])
                sides = time, height // 2, width // 2
            media = (
                MediaItem(
                    kind="image",
                    start=start,
                    stop=start + ids.count(IMAGE),
                    token_id=IMAGE,
                    digest=digest_of("image", features),
                    features=features,
                    grid=sides,
                ),
            )
        ids = np.array(ids, np.int32)
        return EmbedRequest(rid=rid, input_ids=ids, media=media, form="tokens")

    def vectors(self, serving, tag, indices) -> list[np.ndarray]:
        for index in indices:
            serving.scheduler.add(self.request(f"{tag}{index}", index))
        serving.run()
        found = [serving.outputs[f"{tag}{index}"][-1] for index in indices]
        assert not [out.finish for out in found if out.finish.type == "abort"]
        return [out.embedding for out in found]

    def serving(self, **options) -> Serving:
        [control] = media_control(MediaConfig(), self.config)
        return Serving(
            self.folder,
            capabilities=(control,),
            workers=(media_worker,),
            options={"embed": PoolingOverride(), "headless": True},
            runner="program",
            **options,
        )


@pytest.mark.parametrize("name", KINDS)
def test_every_token_has_the_vector_of_transformers(name, tmp_path):
    pages = Pages(name, tmp_path)
    every = range(len(pages.prompts))
    serving = pages.serving()
    together = pages.vectors(serving, "a", every)
    for index, found in zip(every, together, strict=True):
        expected = pages.expected(index)
        assert found.shape == expected.shape == (len(pages.prompts[index][0]), 12)
        assert np.abs(found - expected).max() <= FAR
    alone = [pages.vectors(serving, f"b{i}-", [i])[0] for i in every]
    serving.close()
    most = 32 if name == "colqwen2" else 64
    whole = name == "colmodernvbert"  # no engine cuts a prompt that is read in both directions
    cut = pages.serving(chunk_tokens=5, max_batch_tokens=most, whole_prompts=whole)
    chunked = pages.vectors(cut, "c", every)
    cut.close()
    for one, other, third in zip(together, alone, chunked, strict=True):
        assert one.tobytes() == other.tobytes() == third.tobytes()
