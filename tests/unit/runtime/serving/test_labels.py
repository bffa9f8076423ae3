"""The meaning of a classifier's numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sylvan.runtime.serving.labels import Labels, read_labels


def labels(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_labels(str(tmp_path))


def test_names_come_from_the_checkpoint(tmp_path):
    found = labels(tmp_path, id2label={"0": "spam", "1": "ham"})

    assert [found.name(i) for i in range(3)] == ["spam", "ham", "LABEL_2"]


def test_probabilities_sum_to_one_unless_labels_are_independent(tmp_path):
    values = np.array([1.0, 2.0, -1.0], np.float32)
    apart = labels(tmp_path, problem_type="multi_label_classification")

    assert Labels().probabilities(values).sum() == pytest.approx(1.0)
    assert apart.probabilities(values) == pytest.approx(1 / (1 + np.exp(-values)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 1 / (1 + np.exp(-2.0))),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 2.0),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 2.0),
        ({"architectures": ["Qwen2ForRewardModel"]}, 2.0),
    ],
)
def test_relevance_is_a_probability_unless_the_checkpoint_says_otherwise(
    tmp_path, config, expected
):
    found = labels(tmp_path, **config)

    assert found.relevance(np.array([2.0], np.float32)) == pytest.approx(expected)


def test_of_two_labels_the_second_means_relevant():
    relevant = Labels().relevance(np.array([0.0, 2.0], np.float32))

    assert relevant == pytest.approx(np.exp(2) / (1 + np.exp(2)))
    assert Labels().relevance(np.zeros(3, np.float32)) is None


def test_a_broken_config_leaves_defaults(tmp_path):
    (tmp_path / "config.json").write_text("{")

    assert read_labels(str(tmp_path)) == Labels()
