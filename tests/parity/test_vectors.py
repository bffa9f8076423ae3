"""Encoders, embedders and classifiers: vectors equal those of transformers, in fp32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from sylvan.config.tasks import is_causal, tasks_of
from sylvan.kernels import describe
from sylvan.runtime.models.registry import MODELS, load_config
from tests.parity.checkpoints import VOCAB
from tests.parity.test_families import internlm2_names
from tests.parity.vectors import COSINE, VECTORS, VectorServing, compare_vectors, make, serve

compiled = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

SAMPLE = (
    *("bert-embed", "xlm-roberta-embed", "modernbert-embed", "qwen3-embed", "embeddinggemma-embed"),
    *("bert-classify", "modernbert-classify", "qwen3-classify"),
)
NOT_IN_TRANSFORMERS = {
    *("LlamaBidirectionalModel", "Qwen2ForRewardModel", "Qwen3ForRewardModel"),
    *("Contriever", "InternLM2ForRewardModel", "LlamaEmbeddingModel"),
    *("Qwen2ForProcessRewardModel", "LlamaForClassification"),
    "LlamaForSequenceClassificationWithNormal_Weights",
}
MODULES = (".encoder", ".pooling_models", ".clip")
PROJECTED = {"CLIPModel", "CLIPTextModelWithProjection"}  # see test_clip.py


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_vectors_equal_those_of_transformers(name, tmp_path):
    found = compare_vectors(name, tmp_path)

    assert found.unequal == []
    assert found.runner.startswith("program") == (describe().variant is not None)
    assert found.cosine >= COSINE
    assert found.largest < 1e-5


@pytest.mark.slow
@compiled
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", None), ("bfloat16", "w8a8"), ("float32", "w8a8")]
)
@pytest.mark.parametrize("name", ["bert-classify", "modernbert-embed", "electra-embed"])
def test_bits_do_not_depend_on_the_batch(name, dtype, quantization, tmp_path):
    make(name, tmp_path)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in (40, 3, 17, 65)]
    pooling = None if name.endswith("classify") else "mean"

    def serving(threads: int) -> VectorServing:
        options = {"dtype": dtype, "quantization": quantization, "threads": threads}
        return serve(tmp_path, pooling, options=options)

    together = serving(2).embed(prompts)
    kept = serving(1)
    alone = [kept.embed([prompt])[0] for prompt in prompts]

    assert kept.facts.runner.startswith("program")
    assert all(np.array_equal(*pair) for pair in zip(together, alone, strict=True))


@compiled
@pytest.mark.parametrize("name", ["bert-classify", "xlm-roberta-classify", "modernbert-embed"])
def test_programs_answer_as_pytorch_does(name, tmp_path):
    make(name, tmp_path)
    prompts = [list(range(5, 25)), [7]]
    types = np.array([0] * 8 + [1] * 12, np.int32)

    found, expected = (
        serve(tmp_path, runner=runner).embed(prompts, types) for runner in ("program", "eager")
    )

    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_every_architecture_of_vectors_is_compared():
    served = {n for n, module in MODELS.items() if module.endswith(MODULES)}
    results = json.loads((Path(__file__).parent / "results.json").read_text())
    listed = {results[name]["architecture"] for name in VECTORS}

    heads = {n for n in served if n.endswith("ForMaskedLM")}  # read as the bare model
    assert served - heads - PROJECTED - NOT_IN_TRANSFORMERS == listed


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "distilbert", "modernbert", "electra"])
def test_the_head_of_masked_words_is_left_out(name, tmp_path):
    model = make(f"{name}-embed", tmp_path / "bare")
    masked = transformers.AutoModelForMaskedLM.from_config(model.config)
    getattr(masked, masked.base_model_prefix).load_state_dict(model.state_dict(), strict=False)
    masked.save_pretrained(tmp_path / "masked")

    prompt = [list(range(5, 25))]
    same = [serve(tmp_path / kind, "mean").embed(prompt)[0] for kind in ("bare", "masked")]

    assert load_config(tmp_path / "masked").head == "none"
    assert np.array_equal(*same)


def test_old_names_of_norms_are_read(tmp_path):
    make("bert-embed", tmp_path)
    prompt = [list(range(5, 25))]
    before = serve(tmp_path, "cls").embed(prompt)[0]
    file = tmp_path / "model.safetensors"
    old = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(old | {"bert.embeddings.position_ids": torch.arange(4)[None]}, file)

    assert np.array_equal(serve(tmp_path, "cls").embed(prompt)[0], before)


def test_a_reward_model_has_two_matrices(tmp_path):
    """Qwen's reward models come with code of their own: a ReLU between two matrices."""
    model = make("qwen2-embed", tmp_path)
    file, size = tmp_path / "model.safetensors", model.config.hidden_size
    torch.manual_seed(5)
    first, last = (torch.randn(n, size) * 0.2 for n in (size, 1))
    bias = torch.randn(size), torch.randn(1)
    head = {"0.weight": first, "0.bias": bias[0], "2.weight": last, "2.bias": bias[1]}
    tensors = {f"model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {f"score.{name}": tensor for name, tensor in head.items()}, file)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["architectures"] = ["Qwen2ForRewardModel"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ids = np.random.default_rng(2).integers(4, VOCAB, 19).tolist()

    found = serve(tmp_path).embed([ids])[0]

    with torch.inference_mode():
        hidden = model(torch.tensor([ids])).last_hidden_state[0, -1]
        expected = F.linear(F.relu(F.linear(hidden, first, bias[0])), last, bias[1])
    assert found == pytest.approx(expected.numpy(), abs=1e-4)


def _renamed(path: Path, architecture: str) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))


@pytest.mark.parametrize(
    ("name", "architecture", "pooling"),
    [("bert-embed", "Contriever", "mean"), ("llama-embed", "LlamaEmbeddingModel", "last")],
)
def test_embedders_under_other_names(name, architecture, pooling, tmp_path):
    make(name, tmp_path)
    prompt = [list(range(5, 25))]
    expected = serve(tmp_path, pooling).embed(prompt)[0]
    _renamed(tmp_path, architecture)

    assert np.array_equal(serve(tmp_path).embed(prompt)[0], expected)


def test_internlm_rewards_by_one_matrix(tmp_path):
    model = make("llama-embed", tmp_path)
    file, size = tmp_path / "model.safetensors", model.config.hidden_size
    tensors, found = load_file(file), {}
    for tensor in tensors:
        found |= internlm2_names(tensor, tensors)
    matrix = torch.randn(1, size, generator=torch.Generator().manual_seed(5)) * 0.2
    found = {f"model.{n}": t.contiguous() for n, t in found.items()} | {"v_head.weight": matrix}
    save_file(found, file)
    _renamed(tmp_path, "InternLM2ForRewardModel")
    ids = np.random.default_rng(2).integers(4, VOCAB, 19).tolist()

    reward = serve(tmp_path).embed([ids])[0]

    with torch.inference_mode():
        expected = F.linear(model(torch.tensor([ids])).last_hidden_state[0, -1], matrix)
    assert reward == pytest.approx(expected.numpy(), abs=1e-4)


def _with_head(path: Path, architecture: str, head: dict[str, torch.Tensor], **config: int) -> None:
    """Make a classifier of the model in a directory."""
    file = path / "model.safetensors"
    tensors = {f"model.{n.removeprefix('model.')}": t for n, t in load_file(file).items()}
    save_file(tensors | head, file)
    raw = json.loads((path / "config.json").read_text())
    changed = raw | {"architectures": [architecture]} | config
    (path / "config.json").write_text(json.dumps(changed))


def test_a_classifier_of_llama_has_a_matrix_of_its_own_name(tmp_path):
    model = make("llama-embed", tmp_path)
    matrix = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(5))
    head = {"classification_head.weight": matrix * 0.2}
    _with_head(tmp_path, "LlamaForClassification", head, classification_out_size=5)
    ids = np.random.default_rng(2).integers(4, VOCAB, 19).tolist()

    found = serve(tmp_path).embed([ids])[0]

    with torch.inference_mode():
        expected = F.linear(model(torch.tensor([ids])).last_hidden_state[0, -1], matrix * 0.2)
    assert found == pytest.approx(expected.numpy(), abs=1e-4)


@pytest.mark.parametrize("runner", ["auto", "eager"])
def test_rewards_of_several_aims_are_weighed(runner, tmp_path):
    """URM: the first numbers of five pairs, weighted by an mlp over the same vector."""
    model = make("llama-embed", tmp_path)
    size, random = model.config.hidden_size, torch.Generator().manual_seed(5)
    sizes = {"score": (10, size), "weights.fc.0": (size, size), "weights.fc.2": (size, size)}
    sizes["weights.fc.4"] = 5, size
    head = {f"{n}.weight": torch.randn(*s, generator=random) * 0.2 for n, s in sizes.items()}
    layers = {name: size for name, size in sizes.items() if "fc" in name}
    head |= {f"{n}.bias": torch.randn(s[0], generator=random) for n, s in layers.items()}
    architecture = "LlamaForSequenceClassificationWithNormal_Weights"
    _with_head(tmp_path, architecture, head, num_labels=10)
    ids = np.random.default_rng(2).integers(4, VOCAB, 19).tolist()

    found = serve(tmp_path, runner=runner).embed([ids])[0]

    with torch.inference_mode():
        hidden = model(torch.tensor([ids])).last_hidden_state[0, -1]
        inner = hidden
        for layer in (0, 2):
            name = f"weights.fc.{layer}."
            inner = F.selu(F.linear(inner, head[name + "weight"], head[name + "bias"]))
        shares = F.linear(inner, head["weights.fc.4.weight"], head["weights.fc.4.bias"])
        expected = (F.linear(hidden, head["score.weight"])[::2] * shares).sum()
    assert found == pytest.approx([float(expected)], abs=1e-3)


def test_a_decoder_may_attend_in_both_directions(tmp_path):
    make("qwen2-embed", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"is_causal": False}))
    (tmp_path / "bidirectional").touch()
    ids = list(range(5, 25))

    first, changed = serve(tmp_path, "cls").embed([ids, [*ids[:-1], 30]])

    assert not load_config(tmp_path).causal
    assert not np.allclose(first, changed, atol=1e-3)


def test_the_prefix_cache_serves_embedders_exactly(tmp_path):
    make("qwen3-embed", tmp_path)
    ids = np.random.default_rng(1).integers(4, VOCAB, 64).tolist()
    cold = serve(tmp_path, "last").embed([ids])[0]
    warm = serve(tmp_path, "last")
    warm.embed([[*ids[:48], 7, 8]])

    found = warm.embed([ids])[0]

    assert np.array_equal(found, cold)
    assert warm.scheduler.load().cached_prompt_tokens >= 48


EMBEDDERS = ("encoder", "pooling_models", "clip", "siglip", "retrieval")
"""Modules whose models have no head."""


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_tasks_are_known_without_torch(architecture, tmp_path):
    """The configuration and the registry agree on what an architecture is for."""
    raw = {"architectures": [architecture]}
    module = MODELS[architecture].rpartition(".")[2]

    task = tasks_of(raw, tmp_path)[0]

    scores = architecture.endswith(("ForClassification", "RewardModel", "Normal_Weights"))
    scores |= architecture.endswith("ForSequenceClassification")
    vectors = "classify" if scores else "embed"
    assert task == (vectors if module in EMBEDDERS else "generate")
    bidirectional = architecture in ("EuroBertModel", "LlamaBidirectionalModel")
    assert is_causal(raw) == (module not in ("encoder", "siglip") and not bidirectional)
