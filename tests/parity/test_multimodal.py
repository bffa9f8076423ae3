"""Models that see or hear answer as transformers does, whatever is batched, cut, cached or lost."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from sylvan.config.media import MediaConfig
from sylvan.media.processor import digest_of
from sylvan.protocol.media import MediaItem
from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.features.multimodal.build import media_control, media_worker
from sylvan.runtime.features.multimodal.control import Multimodal
from sylvan.runtime.features.multimodal.transformers_encoder import TransformersEncoder
from sylvan.runtime.models.registry import load_config
from tests.parity.serving import Serving
from tests.support.multimodal import FAMILIES, write
from tests.support.newer_media import NEWER

NEW = 10
ALWAYS = ("gemma3", "llava", "llava-next", "qwen2.5-vl-video", "qwen3-vl", "voxtral")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in ALWAYS]


class Eyes:
    """A tiny checkpoint, and prompts with items drawn at random."""

    def __init__(self, name, folder) -> None:
        self.family, self.folder = FAMILIES[name], folder
        self.model = write(name, folder)
        self.config = load_config(folder)
        encoder = TransformersEncoder(folder, torch.float32)
        rng = np.random.default_rng(3)
        self.prompts = []
        for count in (0, 1, 2, 1):
            # transformers lets text before all images attend to them, unlike Llama's own code
            lead = 0 if self.family.cross and count else 4
            ids, media = rng.integers(3, 250, lead).tolist(), []
            for _ in range(count):
                features = self.family.draw(rng)
                with torch.inference_mode():
                    [vectors, *_] = encoder.encode(self.family.kind, features)
                tokens = self._tokens(rng, features, len(vectors))
                media.append(self._item(features, len(ids), len(tokens)))
                ids += tokens + rng.integers(3, 250, 3).tolist()
            self.prompts.append((ids, tuple(media)))

    def _tokens(self, rng, features, count) -> list[int]:
        """The placeholders of an item, for some videos with timestamps as text between them."""
        token = self.family.token
        if self.family.cross:
            return [token]
        if not self.family.parts:
            return [token] * count
        times = int(features["video_grid_thw"][0, 0])
        each = [rng.integers(3, 250, 2).tolist() + [token] * (count // times)] * times
        return [x for part in each for x in part]

    def _item(self, features, start, count) -> MediaItem:
        grid, step = None, 1.0
        found = [array for name, array in features.items() if name.endswith("_grid_thw")]
        if self.config.rope_axes and found:
            time, height, width = (int(n) for n in found[0][0])
            grid = time, height // 2, width // 2
        if "second_per_grid_ts" in features:
            step = 4.0 * float(features["second_per_grid_ts"][0])  # `tokens_per_second`
        return MediaItem(
            kind=self.family.kind,
            start=start,
            stop=start + count,
            token_id=self.family.token,
            digest=digest_of(self.family.kind, features),
            features=features,
            grid=grid,
            time_step=step,
        )

    def expected(self) -> list[list[int]]:
        return [self._reference(ids, media) for ids, media in self.prompts]

    def _reference(self, ids, media) -> list[int]:
        features: dict[str, Any] = {}
        for item in media:
            for name, array in item.features.items():
                if name not in self.family.own:
                    features.setdefault(name, []).append(torch.from_numpy(array))
        dims = self.family.join
        joined = {name: torch.cat(parts, dims.get(name, 0)) for name, parts in features.items()}
        inputs = torch.tensor([ids])
        told = self._told(inputs)
        if self.family.cross and media:
            told["cross_attention_mask"] = self._cross_mask(ids, media)
        found = self.model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            **joined,
            **told,
        )
        return found[0, len(ids) :].tolist()

    def _cross_mask(self, ids, media) -> torch.Tensor:
        """Which tiles a token attends to, as the processor of Llama 3.2 says."""
        spans = get_cross_attention_token_mask(ids, self.family.token)
        tiles = [int(item.features["aspect_ratio_mask"].sum()) for item in media]
        made = convert_sparse_cross_attention_mask_to_dense([spans], [tiles], 4, len(ids))
        return torch.from_numpy(made)

    def _told(self, inputs) -> dict[str, Any]:
        kind = 2 if self.family.kind == "video" else 0 if self.family.prefix else 1
        types = (inputs == self.family.token).int() * kind
        return {self.family.types: types} if self.family.types else {}

    def serving(self, **options) -> tuple[Serving, Multimodal]:
        settings = MediaConfig(vector_bytes=1 << 20)
        [control] = media_control(settings, self.config)
        options = {"workers": (media_worker,)} | options
        return Serving(self.folder, capabilities=(control,), **options), control

    def request(self, rid, index) -> GenerateRequest:
        ids, media = self.prompts[index]
        return GenerateRequest(
            rid=rid,
            input_ids=np.array(ids, np.int32),
            output_ids=np.empty(0, np.int32),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=NEW, sampling_seed=1),
            media=media,
        )

    def answers(self, serving, tag="a", indices=None) -> list[list[int]]:
        indices = range(len(self.prompts)) if indices is None else indices
        rids = [f"{tag}{i}" for i in indices]
        for rid, index in zip(rids, indices, strict=True):
            serving.scheduler.add(self.request(rid, index))
        serving.run()
        assert not [serving.finish[rid] for rid in rids if serving.finish[rid].type == "abort"]
        return [serving.tokens[rid] for rid in rids]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALWAYS, *OTHERS])
def test_answers_equal_transformers(name, tmp_path):
    eyes = Eyes(name, tmp_path)
    expected = eyes.expected()
    most = 64 if eyes.family.prefix else 32  # no step cuts a prompt, or an image

    runner = "program" if eyes.family.path == "native" else "auto"
    tight = {"runner": runner, "chunk_tokens": 5, "max_batch_tokens": most}
    ways = [{"runner": "eager"}, tight | {"preempt_every": 7}]
    if name not in NEWER:  # one by one, too
        ways += [{"runner": runner}, tight, {"runner": runner, "preempt_every": 7}]
    for options in ways:
        serving, control = eyes.serving(**options)
        assert eyes.answers(serving) == expected, options
        assert control.counts.encoded == 4
        assert eyes.answers(serving, "again") == expected, options
        assert control.counts.encoded == 4  # by the prefix cache, or the vectors that are kept
        serving.close()
    assert eyes.config.path == eyes.family.path


def test_prompts_longer_than_a_window_are_refused_where_all_tokens_see_each_other(tmp_path):
    eyes = Eyes("paligemma2", tmp_path)
    serving, _ = eyes.serving(runner="program")
    for rid, count in (("fits", 44), ("long", 45)):
        ids = np.arange(3, 3 + count, dtype=np.int32)
        request = msgspec.structs.replace(eyes.request(rid, 0), input_ids=ids, media=())
        serving.scheduler.add(request)
    serving.run()
    assert serving.finish["fits"].type == "length"
    assert serving.finish["long"].type == "abort"
    assert "at most 44 tokens" in serving.finish["long"].message
    serving.close()


@pytest.fixture(scope="module")
def eyes(tmp_path_factory):
    return Eyes("qwen2-vl", tmp_path_factory.mktemp("qwen2-vl"))


def test_items_decide_the_answer(eyes):
    serving, _ = eyes.serving(runner="program")
    asked = eyes.request("asked", 1)
    [item] = asked.media
    features = item.features | {"pixel_values": -item.features["pixel_values"]}
    item = msgspec.structs.replace(item, digest=digest_of("image", features), features=features)
    other = msgspec.structs.replace(asked, rid="other", media=(item,))
    for request in (asked, other):  # the same tokens
        serving.scheduler.add(request)
        serving.run()
    assert serving.tokens["asked"] != serving.tokens["other"]
    serving.close()


def test_an_item_is_encoded_once_for_many(eyes):
    serving, control = eyes.serving(runner="program", max_running_reqs=4)
    [alone] = eyes.answers(serving, "alone", [2])
    together = [eyes.answers(serving, f"r{n}-", [2])[0] for n in range(8)]
    assert together == [alone] * 8
    assert control.counts.encoded == 2
    serving.close()


def test_vectors_without_requests_are_dropped_by_age(eyes):
    control = Multimodal(1 << 10, axes=True)
    serving = Serving(
        eyes.folder, capabilities=(control,), workers=(media_worker,), runner="program", pages=12
    )
    first = eyes.answers(serving, "a", [1, 2, 3])
    serving.run()
    assert control.counts.kept_bytes <= 1 << 10
    serving.scheduler.flush_cache()
    assert eyes.answers(serving, "b", [1, 2, 3]) == first
    assert control.counts.encoded > 4
    serving.close()


def test_tenants_share_no_vectors(eyes):
    serving, control = eyes.serving(runner="program")
    for tenant in ("", "acme/", "bravo/"):
        request = eyes.request(f"of-{tenant}", 1)
        serving.scheduler.add(msgspec.structs.replace(request, cache_salt=tenant))
    serving.run()
    assert control.counts.encoded == 3
    assert len({tuple(serving.tokens[f"of-{t}"]) for t in ("", "acme/", "bravo/")}) == 1
    serving.close()


def test_an_item_that_the_encoder_refuses_fails_its_request_only(eyes):
    serving, control = eyes.serving(runner="program")
    bad = eyes.request("bad", 1)
    [item] = bad.media
    features = item.features | {"pixel_values": np.full_like(item.features["pixel_values"], np.nan)}
    item = msgspec.structs.replace(item, digest=b"bad", features=features)
    serving.scheduler.add(msgspec.structs.replace(bad, media=(item,)))
    serving.scheduler.add(eyes.request("good", 3))
    serving.run()
    assert serving.finish["bad"].type == "abort"
    assert "not finite" in serving.finish["bad"].message
    assert serving.tokens["good"] == eyes.answers(serving, "again", [3])[0]
    assert control.counts.encoded == 1
    serving.close()


def logprobs_of(eyes, serving, indices, tag) -> dict[int, list[list[float]]]:
    for index in indices:
        request = eyes.request(f"{tag}{index}", index)
        asked = msgspec.structs.replace(request, logprobs=LogprobOptions(top=2))
        serving.scheduler.add(asked)
    serving.run()
    found = {index: serving.outputs[f"{tag}{index}"] for index in indices}
    return {
        index: [out.logprobs.logprobs.tolist() for out in outputs if out.logprobs is not None]
        for index, outputs in found.items()
    }


def test_batched_equals_alone_bit_for_bit(eyes):
    serving, _ = eyes.serving(runner="program", chunk_tokens=6)
    together = logprobs_of(eyes, serving, range(4), "t")
    serving.close()
    serving, _ = eyes.serving(runner="program")
    alone: dict[int, list[list[float]]] = {}
    for index in range(4):
        alone |= logprobs_of(eyes, serving, [index], "a")
    serving.close()
    assert together == alone


@pytest.mark.slow
def test_stacks_of_experts_are_read_in_both_orders(tmp_path):
    eyes = Eyes("qwen3-vl-moe", tmp_path)
    path = tmp_path / "model.safetensors"
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    expected = eyes.expected()
    save_file(turned, path, {"format": "pt"})
    serving, _ = eyes.serving(runner="program")
    assert eyes.answers(serving) == expected
    serving.close()


def resident_kib() -> int:
    """Memory of this process that is in RAM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")
def test_a_thousand_images_leave_memory_as_it_was(eyes):
    """Each is another one; of what they leave behind, all counts are bounded."""
    serving, control = eyes.serving(runner="program", pages=200)
    rng = np.random.default_rng(7)
    sizes: list[int] = []
    for number in range(1000):
        features = {
            "pixel_values": rng.normal(size=(16, 96)).astype(np.float32),
            "image_grid_thw": np.array([[1, 4, 4]], np.int64),
        }
        item = eyes._item(features, 1, 4)
        ids = np.array([3, *[eyes.family.token] * 4, 5], np.int32)
        request = msgspec.structs.replace(
            eyes.request(f"n{number}", 0),
            input_ids=ids,
            media=(item,),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=1, sampling_seed=1),
        )
        serving.scheduler.add(request)
        if number % 20 == 19:
            serving.run()
            serving.tokens.clear()
            serving.outputs.clear()
            serving.finish.clear()
        if number in (299, 999):
            gc.collect()
            sizes.append(resident_kib())
    counts = control.counts
    assert counts.encoded == 1000
    assert counts.kept_bytes <= 1 << 20
    assert counts.load["encoder_entries"] <= (1 << 20) // (4 * 64 * 4)
    assert not control._prompts
    assert sizes[1] - sizes[0] < 32 << 10, sizes
    serving.close()


def test_tenants_share_nothing_that_could_be_measured(eyes):
    """KV, vectors and encoder results are not shared: each is computed as for the first."""
    told: list[tuple] = []
    serving, control = eyes.serving(runner="program")
    for tenant in ("acme/", "bravo/", "acme/"):
        before = control.counts
        rid = f"{tenant}{len(told)}"
        request = msgspec.structs.replace(eyes.request(rid, 2), cache_salt=tenant)
        serving.scheduler.add(request)
        serving.run()
        after, usage = control.counts, serving.outputs[rid][-1].usage
        hits = after.load["image_hits"] - before.load["image_hits"]
        told.append((after.encoded - before.encoded, hits, usage.cached_tokens))
    first, other, again = told
    assert first == other == (2, 0, 0)
    assert again[0] == 0
    assert again[2] > 0
    serving.close()
