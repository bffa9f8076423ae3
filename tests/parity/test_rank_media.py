"""Ranks and pipeline stages of models that see, hear or read: each encodes the items for itself."""

from __future__ import annotations

import threading
import time
from functools import partial

import msgspec
import pytest

from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.multimodal.build import media_worker
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from tests.parity.reading import START, ReadingServing, pair
from tests.parity.test_multimodal import Eyes
from tests.parity.test_whisper import SPEECH, Ears
from tests.support.ranks import build_ranks
from tests.support.stages import build_stages

_LOADING = threading.Lock()
"""transformers loads one model at a time; ranks are threads here."""
TEXTS = [[START, first] for first in (5, 6, 7)]


def late_worker(context):
    """The last rank's encoder takes longer than that of the first one, which reports."""
    with _LOADING:
        worker = media_worker(context)
    mesh = context.build.mesh
    if worker is not None and mesh.tp.rank == mesh.tp.size - 1 and mesh.tp.size > 1:
        encode = worker._encoder.encode

        def late(kind, features):
            time.sleep(0.05)
            return encode(kind, features)

        worker._encoder.encode = late
    return worker


BUILD = partial(build_executor, parts=ExecutorParts((*STANDARD_WORKERS, late_worker)))


def divided(**given):
    """Options of a `Serving` whose ranks all have the worker half."""
    return {"workers": (), "build": build_ranks(2, BUILD), **given}


def staged(**given):
    return {"workers": (), "build": build_stages(2, build=BUILD), "overlap": True, **given}


def test_a_sound_reaches_every_rank(tmp_path):
    ears = Ears(tmp_path)
    one, _ = ears.serving(runner="eager")
    two, control = ears.serving(**divided())
    expected = ears.answers(one, "one")

    assert ears.answers(two, "cold") == expected
    assert ears.answers(two, "warm") == expected
    assert control.counts.encoded == 3
    two.close()
    assert two.executor.lost == []


def test_what_tokens_attend_to_is_told_of_the_heads_of_all_ranks(tmp_path):
    ears = Ears(tmp_path)
    found = []
    for options in ({"runner": "eager"}, divided()):
        serving, _ = ears.serving(**options)
        request = ears.request("asked", ears.sounds[0], SPEECH)
        sampling = msgspec.structs.replace(request.sampling, max_new_tokens=1)
        serving.scheduler.add(msgspec.structs.replace(request, sampling=sampling, align=24))
        serving.run()
        found += [o.embedding for o in serving.outputs["asked"] if o.embedding is not None]
        serving.close()
    one, two = found

    assert two == pytest.approx(one, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "nllb", "bart-pair"])
def test_a_text_reaches_every_rank(family, tmp_path):
    pair(family, tmp_path)
    one, two = ReadingServing(tmp_path), ReadingServing(tmp_path, **divided())

    expected = one.generate(TEXTS, max_new_tokens=8)

    assert two.generate(TEXTS, max_new_tokens=8) == expected
    two.close()
    assert two.executor.lost == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "mllama", "qwen2-vl", "qwen3-vl"])
def test_an_image_reaches_every_rank(name, tmp_path):
    eyes = Eyes(name, tmp_path)
    expected = eyes.expected()
    two, control = eyes.serving(**divided())

    assert eyes.answers(two) == expected
    assert eyes.answers(two, "again") == expected
    assert control.counts.encoded == 4
    two.close()
    assert two.executor.lost == []


@pytest.mark.parametrize("name", [pytest.param("llava", marks=pytest.mark.slow), "qwen2-vl"])
def test_an_image_is_seen_by_the_first_stage(name, tmp_path):
    eyes = Eyes(name, tmp_path)
    two, _ = eyes.serving(**staged(chunk_tokens=16, max_batch_tokens=32))
    one, _ = eyes.serving(runner="eager")
    expected = eyes.answers(one)

    assert eyes.answers(two) == expected
    assert eyes.answers(two, "again") == expected
    two.close()
