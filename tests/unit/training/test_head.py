"""A head in training computes what it will compute in use, and learns from what the model says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import common_fields, make_config
from sylvan.training.answers import TrainingText, load, save
from sylvan.training.head import PastKV, TrainableHead
from sylvan.training.loop import STATE, Schedule, SharedWeights, Trainer, collate, losses
from tests.support.draft_heads import expected_draft, model_outputs, write_head
from tests.support.random_model import HIDDEN, VOCAB, write_random_model

TOKENS = [5, 9, 200, 31, 88, 17, 40]
LAYERS = (1, 0, 0)  # that the head of a model of two layers reads


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def weights(model_dir):
    return load_file(model_dir / "model.safetensors")


@pytest.fixture(scope="module")
def head_dir(tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("head"), "eagle3", embedding=False)


def head_of(head_dir):
    raw = json.loads((head_dir / "config.json").read_text())
    config = make_config(common_fields(raw) | {"num_hidden_layers": 1})
    head = TrainableHead(config, 3 * HIDDEN, VOCAB, 64)
    if (head_dir / "model.safetensors").exists():
        head.load_state_dict(load_file(head_dir / "model.safetensors"))
    return head


def text_of(weights, tokens, prompt_len=2):
    outputs, final_hidden = model_outputs(weights, tokens[:-1])
    features = torch.cat([outputs[layer] for layer in LAYERS], 1)
    return TrainingText(np.array(tokens, np.int32), prompt_len, features, final_hidden)


def shared(weights, ids=range(VOCAB)):
    return SharedWeights(
        weights["model.embed_tokens.weight"], weights["lm_head.weight"], torch.tensor([*ids])
    )


def test_passes_are_those_of_a_head_in_use(model_dir, head_dir, weights):
    """Names are those of a checkpoint; row i of pass j is draft token j + 1 after i + 2 tokens."""
    head, text, past = head_of(head_dir), text_of(weights, TOKENS), PastKV([], [])
    embedding = weights["model.embed_tokens.weight"]
    count = len(TOKENS) - 1
    wanted = [expected_draft(model_dir, head_dir, TOKENS[: i + 2], 4) for i in range(count)]
    fed = torch.tensor(TOKENS[1:])
    with torch.no_grad():
        hidden = head.fc(text.features[None])
        for depth in range(4):
            hidden = head(embedding[fed][None], hidden, past)
            fed = head.logits(hidden)[0].argmax(-1)
            assert fed.tolist() == [each[depth] for each in wanted]


def test_only_answers_are_trained_on(head_dir, weights):
    """The prompt and padding weigh nothing, and shares count what the head would get right."""
    head, model = head_of(head_dir), shared(weights)
    short = text_of(weights, TOKENS, prompt_len=4)
    alone, right = losses(head, model, collate([short], torch.device("cpu")), 2)
    changed = TrainingText(
        np.array([*TOKENS[:1], 77, *TOKENS[2:]], np.int32), 7, short.features, short.final_hidden
    )
    padded, _ = losses(
        head, model, collate([short, text_of(weights, [1, 2, 3], 3)], torch.device("cpu")), 2
    )

    assert alone.item() == pytest.approx(padded.item(), rel=1e-5)
    assert len(right) == 2
    assert all(0 <= share <= 1 for share in right)
    nothing, none = losses(head, model, collate([changed], torch.device("cpu")), 1)
    assert none == []
    assert nothing.item() == 0


def test_tokens_outside_the_draft_vocabulary_are_not_trained(head_dir, weights):
    text = text_of(weights, TOKENS)
    said = (text.final_hidden @ weights["lm_head.weight"].T).argmax(-1)
    ids = sorted(set(range(50)) - set(said.tolist()))
    raw = json.loads((head_dir / "config.json").read_text())
    config = make_config(common_fields(raw) | {"num_hidden_layers": 1})
    head = TrainableHead(config, 3 * HIDDEN, len(ids), 64)

    loss, right = losses(head, shared(weights, ids), collate([text], torch.device("cpu")), 3)
    assert loss.item() == 0
    assert right == [0, 0, 0]


@pytest.fixture
def files(tmp_path, weights):
    rng = np.random.default_rng(2)
    found = []
    for number in range(2):
        texts = [
            text_of(weights, rng.integers(0, VOCAB, rng.integers(6, 20)).tolist()) for _ in range(5)
        ]
        save(tmp_path / f"{number}.safetensors", texts)
        found.append(tmp_path / f"{number}.safetensors")
    return found


def test_texts_are_read_as_they_were_written(files, weights):
    texts = load(files[0])
    again = text_of(weights, texts[3].tokens.tolist())

    assert len(texts) == 5
    assert texts[3].prompt_len == 2
    torch.testing.assert_close(texts[3].features, again.features)
    torch.testing.assert_close(texts[3].final_hidden, again.final_hidden)


def trainer(folder, files, weights, head_dir, steps=12):
    folder.mkdir(exist_ok=True)
    schedule = Schedule(steps=steps, batch_tokens=48, depth=2, save_every=5)
    torch.manual_seed(1)
    head = head_of(head_dir)
    return head, Trainer(head, shared(weights), files, folder, schedule, torch.device("cpu"))


def test_interrupted_training_ends_as_if_it_had_not_been(tmp_path, files, weights, head_dir):
    whole, run = trainer(tmp_path / "whole", files, weights, head_dir)
    losses_ = [report.loss for report in run.run()]
    _, run = trainer(tmp_path / "parts", files, weights, head_dir)
    for report in run.run():
        if report.step == 7:
            break
    parts, run = trainer(tmp_path / "parts", files, weights, head_dir)
    again = [report.loss for report in run.run()]

    assert len(losses_) == 12
    assert again == pytest.approx(losses_[5:])
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], weight)


def test_a_state_of_something_else_is_refused(tmp_path, files, weights, head_dir):
    _, run = trainer(tmp_path / "run", files, weights, head_dir)
    next(run.run())
    (tmp_path / "run" / STATE).write_bytes(b"no state")

    with pytest.raises(ConfigError, match="remove it to start over"):
        trainer(tmp_path / "run", files, weights, head_dir)
