"""New weights of a model that sees: its text half takes them, its encoder says that it does not."""

from __future__ import annotations

import pytest

from sylvan.protocol.commands import HashWeights, UpdateWeights
from tests.parity.test_multimodal import Eyes
from tests.support.updates import as_bytes, carry_out, changed, weights_in


@pytest.mark.parametrize("name", ["qwen2-vl", pytest.param("llava", marks=pytest.mark.slow)])
def test_an_encoder_is_not_left_behind_silently(name, tmp_path):
    eyes = Eyes(name, tmp_path)
    serving, _ = eyes.serving(runner="program")
    old, new = weights_in(tmp_path), changed(weights_in(tmp_path))
    text = {part for part in old if "layers." in part and "vis" not in part}
    encoder = {part for part in old if "vis" in part}
    assert text
    assert encoder
    before, answers = carry_out(serving, HashWeights())[0].body, eyes.answers(serving)

    [refused] = carry_out(serving, UpdateWeights(as_bytes(new), partial=False))
    assert refused.status == 400
    assert "belongs to the media encoder" in refused.error
    assert carry_out(serving, HashWeights())[0].body == before

    half = old | {part: new[part] for part in text}
    [done] = carry_out(serving, UpdateWeights(as_bytes(half), partial=False))
    assert not done.error
    assert eyes.answers(serving, "b") != answers
    [back] = carry_out(serving, UpdateWeights(as_bytes({part: old[part] for part in text})))
    assert not back.error
    assert eyes.answers(serving, "c") == answers
    serving.close()
