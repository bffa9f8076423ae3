"""Vectors of tokens, weights of words and rewards of steps equal their published computation."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from sylvan.kernels import describe
from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import EmbedRequest
from tests.parity.checkpoints import SHAPE, VOCAB, write
from tests.parity.vectors import VectorServing, serve

ENCODER = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
STEP = 7


def _texts() -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(8, VOCAB, n).tolist() for n in (40, 3, 17)]


def ask(serving: VectorServing, texts: list[list[int]], form: str, **fields) -> list[np.ndarray]:
    rids = [f"{form}{i}" for i in range(len(texts))]
    for rid, ids in zip(rids, texts, strict=True):
        request = EmbedRequest(rid=rid, input_ids=np.array(ids, np.int32), form=form, **fields)
        serving.scheduler.add(request)
    serving.run()
    found = [serving.outputs[rid][-1] for rid in rids]
    assert not [out.finish.message for out in found if out.finish.type == "abort"]
    return [out.embedding for out in found]


@pytest.fixture
def bge(tmp_path):
    """A tiny checkpoint as BGE-M3's, and its parts: the model, and two matrices with biases."""
    config = transformers.XLMRobertaConfig(**ENCODER | {"pad_token_id": 1})
    model = write(config, 5, tmp_path, auto=transformers.AutoModel)
    generator = torch.Generator().manual_seed(3)
    found = []
    for name, rows in (("colbert_linear", 24), ("sparse_linear", 1)):
        parts = {
            "weight": torch.randn(rows, 64, generator=generator) * 0.2,
            "bias": torch.randn(rows, generator=generator) * 0.2,
        }
        if name == "sparse_linear":  # so that about half of the tokens have a weight
            numbers = F.linear(hidden_of(model, _texts()[0]), parts["weight"])
            parts["bias"] = -numbers.median()[None]
        torch.save(parts, tmp_path / f"{name}.pt")
        found.append((parts["weight"], parts["bias"]))
    return tmp_path, model, *found


def hidden_of(model, ids) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0]


def test_three_heads_equal_those_of_bge_m3(bge):
    path, model, vectors, weights = bge
    serving = serve(path, "cls")

    tokens, words = (ask(serving, _texts(), form) for form in ("tokens", "weights"))
    dense = serving.embed(_texts())

    assert serving.facts.forms == ("text", "tokens", "weights")
    for ids, token_vectors, word_weights, vector in zip(
        _texts(), tokens, words, dense, strict=True
    ):
        hidden = hidden_of(model, ids)
        several = F.normalize(F.linear(hidden[1:], *vectors), dim=-1)
        assert token_vectors.shape == (len(ids) - 1, 24)
        assert token_vectors == pytest.approx(several.numpy(), abs=1e-4)
        assert word_weights == pytest.approx(
            F.linear(hidden, *weights).relu()[:, 0].numpy(), abs=1e-4
        )
        assert vector == pytest.approx(F.normalize(hidden[0], dim=-1).numpy(), abs=1e-4)
    assert any(np.count_nonzero(found) not in (0, len(found)) for found in words)


def test_half_of_the_heads_is_refused(bge):
    (bge[0] / "sparse_linear.pt").unlink()

    with pytest.raises(ConfigError, match=r"lacks sparse_linear\.pt"):
        serve(bge[0])


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_vectors_of_tokens_do_not_depend_on_company_cache_or_chunks(tmp_path):
    write(transformers.Qwen3Config(**SHAPE), 5, tmp_path, auto=transformers.AutoModel)
    serving = serve(tmp_path)
    together, again = (ask(serving, _texts(), "tokens") for _ in range(2))
    alone = [ask(serve(tmp_path), [ids], "tokens")[0] for ids in _texts()]
    chunked = ask(serve(tmp_path, chunk_tokens=16, max_batch_tokens=19), _texts(), "tokens")

    for found in (again, alone, chunked):
        assert all(map(np.array_equal, together, found))
    assert [len(vectors) for vectors in together] == [len(ids) for ids in _texts()]
    last = serving.embed(_texts())
    for vectors, vector in zip(together, last, strict=True):
        assert vectors[-1] == pytest.approx(vector, abs=1e-6)


def test_a_dense_layer_is_applied_to_each_token(tmp_path):
    """As PyLate writes late-interaction models: the model and a matrix without a bias."""
    model = write(transformers.BertConfig(**ENCODER), 5, tmp_path, auto=transformers.AutoModel)
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)) * 0.2
    (tmp_path / "1_Dense").mkdir()
    save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")
    settings = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}
    (tmp_path / "1_Dense" / "config.json").write_text(json.dumps(settings))
    kinds = ("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense")
    modules = [
        {"idx": i, "name": str(i), "path": folder, "type": kind}
        for i, (folder, kind) in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))

    found = ask(serve(tmp_path), _texts(), "tokens")

    for ids, vectors in zip(_texts(), found, strict=True):
        expected = F.normalize(F.linear(hidden_of(model, ids), weight), dim=-1)
        assert vectors == pytest.approx(expected.numpy(), abs=1e-4)


@pytest.fixture
def judge(tmp_path):
    """A tiny checkpoint as Qwen2.5 Math PRM's, and the probabilities of its steps."""
    model = write(transformers.Qwen2Config(**SHAPE), 5, tmp_path, auto=transformers.AutoModel)
    generator = torch.Generator().manual_seed(3)
    head = {
        "score.0.weight": torch.randn(64, 64, generator=generator) * 0.2,
        "score.0.bias": torch.randn(64, generator=generator) * 0.2,
        "score.2.weight": torch.randn(2, 64, generator=generator) * 0.2,
        "score.2.bias": torch.randn(2, generator=generator) * 0.2,
    }
    tensors = load_file(tmp_path / "model.safetensors")
    prefixed = {f"model.{name.removeprefix('model.')}": t for name, t in tensors.items()}
    save_file(prefixed | head, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"architectures": ["Qwen2ForProcessRewardModel"], "num_labels": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tokenizer = {"added_tokens": [{"id": STEP, "content": "<extra_0>", "special": True}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))

    def rewards(ids: list[int]) -> np.ndarray:
        rows = hidden_of(model, ids)[torch.tensor(ids) == STEP]
        inner = F.linear(rows, head["score.0.weight"], head["score.0.bias"]).relu()
        logits = F.linear(inner, head["score.2.weight"], head["score.2.bias"])
        return logits.softmax(-1).numpy()

    return tmp_path, rewards


@pytest.mark.parametrize("runner", ["auto", "eager"])
def test_each_step_is_judged(judge, runner):
    path, rewards = judge
    long, short, middle = _texts()
    texts = [[*long[:12], STEP, *long[12:30], STEP, *long[30:], STEP], short, [*middle, STEP]]
    serving = serve(path, runner=runner)

    together = ask(serving, texts, "steps")
    chunked = ask(serve(path, chunk_tokens=16, max_batch_tokens=19, runner=runner), texts, "steps")

    assert serving.facts.forms == ("steps",)
    assert [found.shape for found in together] == [(3, 2), (0, 2), (1, 2)]
    for ids, found, cut in zip(texts, together, chunked, strict=True):
        assert found == pytest.approx(rewards(ids), abs=1e-4)
        assert found == pytest.approx(cut, abs=1e-6)


def test_chunks_have_the_mean_of_their_tokens_in_the_whole_text(tmp_path):
    model = write(transformers.BertConfig(**ENCODER), 5, tmp_path, auto=transformers.AutoModel)
    (ids, *_), spans = _texts(), ((0, 7), (7, 8), (20, 40))
    serving = serve(tmp_path, "mean")

    (found,) = ask(serving, [ids], "text", spans=spans)
    (plain,) = ask(serving, [ids], "text", spans=spans, normalize=False)
    (whole,) = ask(serving, [ids], "text", spans=((0, len(ids)),))

    hidden = hidden_of(model, ids)
    means = torch.stack([hidden[start:stop].mean(0) for start, stop in spans])
    assert found == pytest.approx(F.normalize(means, dim=-1).numpy(), abs=1e-4)
    assert plain == pytest.approx(means.numpy(), abs=1e-4)
    assert whole[0] == pytest.approx(serving.embed([ids])[0], abs=1e-6)


@pytest.mark.parametrize("runner", ["auto", "eager"])
def test_no_token_attends_to_hidden_ones(runner, tmp_path):
    """Masks that fill up a query (ColBERT) see it, and are seen by nobody, themselves included."""
    model = write(transformers.BertConfig(**ENCODER), 5, tmp_path, auto=transformers.AutoModel)
    texts, hidden = _texts(), 7
    serving = serve(tmp_path, runner=runner)
    for i, ids in enumerate(texts):
        given = np.array([*ids, *[9] * hidden], np.int32)
        request = EmbedRequest(rid=f"q{i}", input_ids=given, form="tokens", hidden=hidden)
        serving.scheduler.add(request)
    plain = EmbedRequest(rid="plain", input_ids=np.array(texts[0], np.int32), form="tokens")
    serving.scheduler.add(plain)
    serving.run()

    for i, ids in enumerate(texts):
        whole, seen = torch.tensor([[*ids, *[9] * hidden]]), len(ids)
        mask = (torch.arange(seen + hidden) < seen).long()[None]
        with torch.inference_mode():
            expected = model(whole, attention_mask=mask).last_hidden_state[0]
        found = serving.outputs[f"q{i}"][-1].embedding
        assert found == pytest.approx(F.normalize(expected, dim=-1).numpy(), abs=1e-4)
    together = serving.outputs["q0"][-1].embedding[: len(texts[0])]
    assert np.array_equal(together, serving.outputs["plain"][-1].embedding)


def test_the_matrix_of_the_first_colbert_is_read(tmp_path):
    """As `colbert-ir/colbertv2.0` is stored: BERT with a prefix, and one matrix beside it."""
    model = write(transformers.BertConfig(**ENCODER), 5, tmp_path, auto=transformers.AutoModel)
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)) * 0.2
    tensors = load_file(tmp_path / "model.safetensors")
    named = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    save_file(named | {"linear.weight": weight}, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["HF_ColBERT"]}))

    found = ask(serve(tmp_path), _texts(), "tokens")

    for ids, vectors in zip(_texts(), found, strict=True):
        expected = F.normalize(F.linear(hidden_of(model, ids), weight), dim=-1)
        assert vectors == pytest.approx(expected.numpy(), abs=1e-4)
