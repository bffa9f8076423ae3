"""Images, videos and sounds on a device: answers are those of the CPU, and no launch waits.

A late device reads nothing before its turn; with `--device cuda` a real GPU does the same, and its
encoder runs there.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.features.multimodal.transformers_encoder import TransformersEncoder
from sylvan.runtime.platform.find import load_kinds, open_platform
from tests.parity.test_multimodal import Eyes
from tests.parity.test_whisper import Ears
from tests.support.chosen import device_name
from tests.support.delayed import DelayedPlatform

# Plain rows; positions with three axes; vectors for layers, too; images that see themselves as a
# whole, and prompts that do.
EVERY = ("llava", "qwen2.5-vl-video", "qwen3-vl", "gemma3", "paligemma")
ALWAYS = ("qwen3-vl", "gemma3")
ON_GPU = pytest.param("gpu", marks=pytest.mark.gpu)
SMALL = {"max_batch_tokens": 64, "max_running_reqs": 4}  # few graphs
TIGHT = SMALL | {"chunk_tokens": 5}  # no step cuts an image


def case(place, name):
    slow = [pytest.mark.slow] if place == "late" and name not in ALWAYS else []
    return pytest.param(place, name, marks=[pytest.mark.gpu] if place == "gpu" else slow)


CASES = [case(place, name) for place in ("late", "gpu") for name in EVERY]


def options_of(place, length=128):
    """Arguments of `Serving` for the device, for texts of `length` tokens."""
    if place == "late":
        options = {"attention": "dense", "context_len": length}
        return {"platform": DelayedPlatform(), "options": options} | SMALL
    gpu = open_platform(load_kinds(())[device_name()])
    return {"platform": gpu, "options": {"device": gpu.facts.name}}


@pytest.fixture(autouse=True)
def whole_numbers(monkeypatch):
    """Convolutions with all bits of float32, so that no token depends on rounding."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def guarded(serving, platform):
    """Launches that wait for the device fail."""
    launch = serving.executor.launch

    def watched(plan):
        with platform.unsynced():
            return launch(plan)

    serving.executor.launch = watched


@pytest.mark.parametrize(("place", "name"), CASES)
def test_answers_are_those_of_transformers(place, name, tmp_path):
    eyes = Eyes(name, tmp_path)
    expected = eyes.expected()
    for runner, overlap, limits in (("graph", True, {}), ("eager", False, TIGHT)):
        where = options_of(place)
        serving, control = eyes.serving(runner=runner, overlap=overlap, **where | limits)
        assert serving.facts.runner == runner
        assert eyes.answers(serving, "cold") == expected
        assert eyes.answers(serving, "warm") == expected
        assert control.counts.encoded == 4
        serving.close()


@pytest.mark.parametrize("place", ["late", ON_GPU])
def test_lost_requests_are_computed_again(place, tmp_path):
    eyes = Eyes("qwen2-vl", tmp_path)
    serving, _ = eyes.serving(runner="graph", preempt_every=7, **options_of(place))
    assert eyes.answers(serving) == eyes.expected()
    serving.close()


@pytest.mark.parametrize("place", ["late", ON_GPU])
def test_sounds_that_layers_attend_to(place, tmp_path):
    ears = Ears(tmp_path)
    serving, control = ears.serving(runner="graph", overlap=True, **options_of(place, 64))
    expected = ears.expected()
    assert ears.answers(serving, "cold") == expected
    assert ears.answers(serving, "warm") == expected
    assert control.counts.encoded == 3
    serving.close()


@pytest.mark.parametrize("place", ["late", ON_GPU])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_launching_does_not_wait(place, tmp_path):
    eyes, where = Eyes("qwen3-vl", tmp_path), options_of(place)
    serving, _ = eyes.serving(runner="graph", overlap=True, **where)
    wanted = eyes.answers(serving, "compiled")
    serving.scheduler.flush_cache()
    guarded(serving, where["platform"])
    assert eyes.answers(serving, "again") == wanted
    serving.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "qwen3-vl", "voxtral", "qwen2-audio"])
def test_encoders_on_a_gpu_give_the_vectors_of_the_cpu(name, tmp_path):
    eyes, device = Eyes(name, tmp_path), torch.device(device_name())
    here = TransformersEncoder(tmp_path, torch.float32)
    there = TransformersEncoder(tmp_path, torch.float32, device=device)
    assert {p.device.type for p in there._model.parameters()} == {device.type}
    for _, media in eyes.prompts:
        for item in media:
            with torch.inference_mode():
                pairs = [e.encode(item.kind, item.features) for e in (here, there)]
            for mine, theirs in zip(*pairs, strict=True):
                assert theirs.device.type == "cpu"
                assert (mine - theirs).abs().max() <= 1e-4 * mine.abs().max()


@pytest.mark.gpu
def test_log_probabilities_with_an_image_come_near_those_of_the_cpu(tmp_path):
    eyes, found = Eyes("qwen2.5-vl", tmp_path), []
    for where in ({"runner": "program"}, {"runner": "graph", **options_of("gpu")}):
        serving, _ = eyes.serving(**where)
        options = LogprobOptions(start=1)
        serving.scheduler.add(msgspec.structs.replace(eyes.request("asked", 2), logprobs=options))
        serving.run()
        parts = [out.prompt_logprobs for out in serving.outputs["asked"] if out.prompt_logprobs]
        found.append(torch.cat([torch.from_numpy(part.logprobs) for part in parts]))
        serving.close()
    assert len(found[0]) > 20
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4, equal_nan=True)
