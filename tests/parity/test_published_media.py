"""Models that see and that transformers lacks answer as their published code does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.config.checkpoint import model_facts
from sylvan.runtime.features.multimodal.published.encoder import PublishedEncoder
from sylvan.runtime.models.registry import load_config
from tests.parity.test_multimodal import NEW, Eyes
from tests.support.media_families import IMAGE, Family
from tests.support.published_media import PUBLISHED


class Seen(Eyes):
    """A tiny checkpoint in its published form, and prompts with images drawn at random."""

    def __init__(self, name, folder) -> None:
        torch.manual_seed(5)
        self.published = PUBLISHED[name](folder)
        self.folder, self.config = folder, load_config(folder)
        self.family = Family(config=lambda: None, draw=self.published.draw, token=IMAGE)
        rng = np.random.default_rng(3)
        self.prompts = []
        for count in (0, 1, 2, 1):
            ids, media = rng.integers(3, 250, 4).tolist(), []
            for _ in range(count):
                features = self.published.draw(rng)
                tokens = [IMAGE] * len(self.vectors(features))
                media.append(self._item(features, len(ids), len(tokens)))
                ids += tokens + rng.integers(3, 250, 3).tolist()
            self.prompts.append((ids, tuple(media)))

    def vectors(self, features) -> torch.Tensor:
        with torch.inference_mode():
            return self.published.see(features)

    def _reference(self, ids, media) -> list[int]:
        model = self.published.text
        inputs = torch.tensor([ids])
        with torch.inference_mode():
            embeds = model.get_input_embeddings()(inputs)
            for item in media:
                embeds[0, item.start : item.stop] = self.vectors(item.features)
            found = model.generate(
                inputs_embeds=embeds,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
            )
        return found[0].tolist()


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_family_can_be_started(name, tmp_path):
    PUBLISHED[name](tmp_path)
    facts, served = model_facts(str(tmp_path)), load_config(tmp_path)
    assert facts.vocab_size == served.vocab_size
    assert facts.context_len == served.max_position_embeddings


@pytest.mark.parametrize("name", PUBLISHED)
def test_vectors_equal_the_published_code(name, tmp_path):
    seen = Seen(name, tmp_path)
    encoder = PublishedEncoder(tmp_path, torch.float32)
    rng = np.random.default_rng(9)
    for _ in range(4):
        features = seen.published.draw(rng)
        [found] = encoder.encode("image", features)
        expected = seen.vectors(features)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    with pytest.raises(ValueError, match="no audio"):
        encoder.encode("audio", {})


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_answers_equal_the_published_code(name, tmp_path):
    seen = Seen(name, tmp_path)
    expected = seen.expected()
    assert len({tuple(answer) for answer in expected}) > 2
    tight = {"runner": "program", "chunk_tokens": 5, "max_batch_tokens": 32, "preempt_every": 7}
    for options in ({"runner": "eager"}, tight):
        serving, control = seen.serving(**options)
        assert seen.answers(serving) == expected, options
        assert control.counts.encoded == 4
        assert seen.answers(serving, "again") == expected, options
        assert control.counts.encoded == 4
        serving.close()
    assert seen.config.path == "native"
