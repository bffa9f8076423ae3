"""Vectors of prompts with images are those of transformers, whatever is batched, cut or cached."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.config.media import MediaConfig
from sylvan.protocol.requests import EmbedRequest
from sylvan.runtime.features.multimodal.build import media_control, media_worker
from sylvan.runtime.models.pooling import PoolingOverride
from tests.parity.serving import Serving
from tests.parity.test_multimodal import Eyes

FAR = 2e-5  # of vectors of length 1


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    return Eyes("qwen2-vl", tmp_path_factory.mktemp("qwen2-vl"))


def expected(eyes, index):
    ids, media = eyes.prompts[index]
    inputs = torch.tensor([ids])
    features: dict[str, list] = {}
    for item in media:
        for name, array in item.features.items():
            features.setdefault(name, []).append(torch.from_numpy(array))
    given = {name: torch.cat(parts) for name, parts in features.items()}
    types = {eyes.family.types: (inputs == eyes.family.token).int()}
    with torch.inference_mode():
        found = eyes.model.model(input_ids=inputs, **given, **types).last_hidden_state[0, -1]
    return (found / found.norm()).numpy()


def vectors(eyes, serving, tag, indices):
    for index in indices:
        ids, media = eyes.prompts[index]
        request = EmbedRequest(rid=f"{tag}{index}", input_ids=np.array(ids, np.int32), media=media)
        serving.scheduler.add(request)
    serving.run()
    found = [serving.outputs[f"{tag}{index}"][-1] for index in indices]
    assert not [out.finish for out in found if out.finish.type == "abort"]
    return [out.embedding for out in found]


def served(eyes, **options):
    [control] = media_control(MediaConfig(), eyes.config)
    made = Serving(
        eyes.folder,
        capabilities=(control,),
        workers=(media_worker,),
        options={"embed": PoolingOverride(), "headless": True},
        runner="program",
        **options,
    )
    return made, control


def test_vectors_equal_transformers(eyes):
    every = range(len(eyes.prompts))
    serving, control = served(eyes)
    together = vectors(eyes, serving, "a", every)
    for index, found in zip(every, together, strict=True):
        assert np.abs(found - expected(eyes, index)).max() <= FAR
    again = [vectors(eyes, serving, f"b{i}-", [i])[0] for i in every]
    assert control.counts.encoded == 4  # by the prefix cache, or the vectors that are kept
    serving.close()

    cut, _ = served(eyes, chunk_tokens=5, max_batch_tokens=32)
    chunked = vectors(eyes, cut, "c", every)
    cut.close()
    for one, other, third in zip(together, again, chunked, strict=True):
        assert one.tobytes() == other.tobytes() == third.tobytes()


def test_images_decide_the_vector(eyes):
    serving, _ = served(eyes)
    ids, [item] = eyes.prompts[1]
    _, [other, _] = eyes.prompts[2]
    assert item.digest != other.digest
    [one] = vectors(eyes, serving, "a", [1])
    plain = EmbedRequest(rid="plain", input_ids=np.array(ids, np.int32))
    serving.scheduler.add(plain)
    serving.run()
    assert np.abs(serving.outputs["plain"][-1].embedding - one).max() > 1e-3
    serving.close()
