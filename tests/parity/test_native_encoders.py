"""Encoders on native kernels give the vectors that PyTorch gives, alone and beside others."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from sylvan.kernels.native.library import load as load_library
from sylvan.runtime.features.multimodal.block_patterns import block_of
from sylvan.runtime.features.multimodal.native_blocks import BlockPrograms, use_native_blocks
from sylvan.runtime.features.multimodal.transformers_encoder import TransformersEncoder
from tests.support.multimodal import FAMILIES, write

CLOSE = 2e-5  # of float32, relative to the largest vector
ALWAYS = ("llava", "qwen2.5-vl", "qwen2-audio")
NATIVE = {
    **dict.fromkeys(("exaone4.5", "gemma3", "glm4v", "idefics2", "idefics3", "internvl"), 2),
    **dict.fromkeys(("lfm2-vl", "llava", "llava-pixtral", "ovis2", "qwen2-audio", "qwen2-vl"), 2),
    **dict.fromkeys(("qwen2.5-omni", "qwen2.5-vl", "smolvlm", "video-llama-3", "voxtral"), 2),
    "qwen3-vl": 3,
    "qwen3-vl-moe": 3,
}
"""How many blocks of these encoders kernels compute, which is all; one family for each class."""


def vectors(encoder, family, features):
    with torch.inference_mode():
        return [part.clone() for part in encoder.encode(family.kind, features)]


@pytest.mark.parametrize(
    "name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in NATIVE]
)
def test_vectors_equal_those_of_pytorch(name, tmp_path):
    family = FAMILIES[name]
    write(name, tmp_path)
    native = TransformersEncoder(tmp_path, torch.float32, native=True)
    other = TransformersEncoder(tmp_path, torch.float32)
    assert (native.native_blocks, other.native_blocks) == (NATIVE[name], 0)

    rng = np.random.default_rng(7)
    items = [family.draw(rng) for _ in range(3)]
    alone = [vectors(native, family, item) for item in items]
    for item, found in zip(items, alone, strict=True):
        for mine, theirs in zip(found, vectors(other, family, item), strict=True):
            assert (mine - theirs).abs().max() <= CLOSE * theirs.abs().max()
    for item, found in zip(reversed(items), reversed(alone), strict=True):  # after other items
        for mine, before in zip(vectors(native, family, item), found, strict=True):
            assert torch.equal(mine, before)


def test_a_pooling_head_that_nothing_reads_is_left_out(tmp_path):
    family = FAMILIES["llava-onevision"]
    write("llava-onevision", tmp_path)
    encoder = TransformersEncoder(tmp_path, torch.float32)
    tower = encoder._model.get_submodule("model.vision_tower")
    features = family.draw(np.random.default_rng(3))

    head, tower.head = tower.head, None  # calling it would fail
    found = vectors(encoder, family, features)
    tower.head, tower.use_head = head, True
    whole = vectors(encoder, family, features)

    assert all(torch.equal(*each) for each in zip(found, whole, strict=True))


@pytest.mark.parametrize("equal", [[0, 0], [0, 1, 0, 1], [0, 1, 2]])
def test_equal_images_of_an_item_are_encoded_once(equal, tmp_path):
    write("llava-onevision", tmp_path)
    encoder = TransformersEncoder(tmp_path, torch.float32, native=True)
    tower = encoder._model.get_submodule("model.vision_tower")
    counts = []
    tower.embeddings.register_forward_pre_hook(lambda _, given: counts.append(len(given[0])))
    side = tower.config.image_size
    distinct = torch.randn(3, 3, side, side)

    found = tower(distinct[equal], output_hidden_states=True)
    apart = [tower(distinct[i : i + 1], output_hidden_states=True) for i in equal]

    assert counts == [len(set(equal)), *[1] * len(equal)]
    assert found.last_hidden_state.shape[0] == len(equal)
    for layer, states in enumerate(found.hidden_states):
        torch.testing.assert_close(states, torch.cat([each.hidden_states[layer] for each in apart]))


def stack(hidden, heads, act, dtype):
    config = transformers.SiglipVisionConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden + 16,
        num_hidden_layers=2,
        num_attention_heads=heads,
        hidden_act=act,
    )
    config._attn_implementation = "sdpa"
    layer = transformers.models.siglip.modeling_siglip.SiglipEncoderLayer
    torch.manual_seed(1)
    made = nn.ModuleList([layer(config) for _ in range(2)]).eval().to(dtype)
    return made.requires_grad_(requires_grad=False)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"]
)
@pytest.mark.parametrize(("hidden", "heads", "act"), [(144, 2, "gelu_pytorch_tanh")])
def test_heads_of_any_width_and_many_rows(hidden, heads, act, dtype, bound):
    """SigLIP's heads have 72 columns, and 700 rows are several chunks of attention."""
    plain, native = (stack(hidden, heads, act, dtype) for _ in range(2))
    assert use_native_blocks(nn.ModuleDict({"layers": native}), dtype, 1) == 2
    rows = torch.randn(1, 700, hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = found = rows
    with torch.inference_mode():
        for mine, theirs in zip(native, plain, strict=True):
            expected, found = theirs(expected, None), mine(found, None)
    assert found.dtype == dtype
    change = (expected - rows).float().norm()
    assert (found.float() - expected.float()).norm() <= bound * change


def test_padding_is_not_attended_to():
    plain, native = (stack(64, 2, "gelu", torch.float32) for _ in range(2))
    assert use_native_blocks(nn.ModuleDict({"layers": native}), torch.float32, 1) == 2
    rows = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(2))
    seen = torch.arange(9) < torch.tensor([[9], [5]])
    mask = seen[:, None, None].expand(2, 1, 9, 9)
    with torch.inference_mode():
        expected, found = plain[0](rows, mask), native[0](rows, mask)
        alone = native[0](rows[1:, :5], None)
        with pytest.raises(ValueError, match="not padding at the end"):
            native[0](rows, mask.flip(-1))
    assert torch.allclose(found[seen], expected[seen], rtol=0, atol=1e-5)
    assert torch.equal(found[1:, :5], alone)


def test_sequences_are_divided_among_calls_and_none_may_be_too_long():
    blocks = [block_of(layer) for layer in stack(64, 2, "gelu", torch.float32)]
    wide, narrow = (
        BlockPrograms(blocks, load_library(), torch.float32, 0, rows=rows, keep=True)
        for rows in (128, 32)
    )
    rows = torch.randn(75, 64, generator=torch.Generator().manual_seed(2))
    cuts = [(0, 20), (20, 30), (30, 62), (62, 75)]
    assert torch.equal(narrow.run(1, rows, cuts, None), wide.run(1, rows, cuts, None))
    with pytest.raises(ValueError, match="33 patches of one image are more than 32"):
        narrow.run(0, rows, [(0, 33), (33, 75)], None)


def test_programs_beside_the_steps_run_at_the_same_time():
    """Two pools of threads: neither waits for the other, and both are right."""
    blocks = [block_of(layer) for layer in stack(64, 2, "gelu", torch.float32)]
    library = load_library()
    step, beside = (
        BlockPrograms(blocks, library, torch.float32, 0, rows=512, keep=True) for _ in range(2)
    )
    beside.run_in_background()
    library.dll.sylvan_background_threads(2)
    rows = torch.randn(300, 64, generator=torch.Generator().manual_seed(2))
    expected = step.run(0, rows, [(0, 300)], None)
    wrong = []

    def run(programs):
        for _ in range(30):
            if not torch.equal(programs.run(0, rows, [(0, 300)], None), expected):
                wrong.append(programs)

    threads = [threading.Thread(target=run, args=(programs,)) for programs in (step, beside)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_other_parts_are_left_to_pytorch():
    """A block with an additional parameter is not recognised."""
    layers = stack(64, 2, "gelu", torch.float32)
    layers[1].gate = nn.Parameter(torch.ones(64))
    assert block_of(layers[0]) is not None
    assert block_of(layers[1]) is None
    assert use_native_blocks(nn.ModuleDict({"layers": layers}), torch.float32, 1) == 0


def test_blocks_that_compute_something_else_are_left_to_pytorch():
    """The names are right, but the numbers are not."""
    layers = stack(64, 2, "gelu", torch.float32)
    for layer in layers:
        forward = layer.forward
        layer.forward = lambda hidden_states, attention_mask, forward=forward: (
            2 * forward(hidden_states, attention_mask)
        )
    assert use_native_blocks(nn.ModuleDict({"layers": layers}), torch.float32, 1) == 0
