"""CLIP's texts: vectors in the space of images equal those of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from tests.parity.checkpoints import SHAPE, VOCAB, write
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
