"""Every name of SGLang's models that see or hear is served, or refused with a reason."""

from __future__ import annotations

import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.refused_media import REFUSED_MEDIA
from sylvan.runtime.models.registry import MODELS, choose_path
from tests.parity.media_names import HEARING, SEEING, answer


def test_each_name_has_an_answer():
    assert (len(SEEING), len(HEARING)) == (66, 15)
    answers = {name: answer(name) for name in (*SEEING, *HEARING)}
    assert sum(found.startswith("served") for found in answers.values()) >= 29


@pytest.mark.parametrize("name", REFUSED_MEDIA)
def test_refusals_give_the_reason(name):
    assert name not in MODELS
    raw = {"architectures": [name], "model_type": "none_such", "text_config": {"vocab_size": 8}}
    with pytest.raises(ConfigError) as error:
        choose_path(raw)
    assert str(error.value) == f"{name} cannot be served: {REFUSED_MEDIA[name]}"


def test_what_is_served_instead_is():
    for name, reason in REFUSED_MEDIA.items():
        words = [word for word in reason.replace(",", " ").split() if "For" in word]
        assert all(word in MODELS for word in words if word != "MiniMaxM3VLForCausalLM"), name
