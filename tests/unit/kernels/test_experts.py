"""Routing and the grouped feed-forward of experts."""

from __future__ import annotations

import torch

from sylvan.kernels.experts import ExpertWeights, Routing, experts, route


def test_chosen_experts_ascend_and_their_weights_follow():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])

    ids, weights = route(logits, Routing(top_k=2, normalise=True))

    assert ids.tolist() == [[1, 3]]
    expected = logits.softmax(-1)[0, [1, 3]]
    assert torch.allclose(weights[0], expected / expected.sum())


def test_experts_outside_the_kept_groups_are_not_chosen():
    logits = torch.tensor([[9.0, -9.0, 1.0, 2.0, 0.0, 0.0]])  # the best expert is in a poor group
    routing = Routing(
        top_k=2, scores="sigmoid", groups=3, kept_groups=1, group_rank="best_two", scale=2.0
    )

    ids, weights = route(logits, routing)

    assert ids.tolist() == [[2, 3]]
    assert torch.allclose(weights, 2 * logits[:, 2:4].sigmoid())


def test_bias_changes_the_choice_but_not_the_weights():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 5.0])

    ids, weights = route(logits, Routing(top_k=1, scores="sigmoid", bias=bias))

    assert ids.tolist() == [[2]]
    assert torch.allclose(weights, torch.tensor([[0.5]]))


def test_sum_over_experts_equals_each_expert_by_itself():
    torch.manual_seed(0)
    x, logits = torch.randn(7, 6), torch.randn(7, 4)
    weights = ExpertWeights(gate_up=torch.randn(4, 10, 6), down=torch.randn(4, 6, 5))
    routing = Routing(top_k=2)

    load = torch.ones(4, dtype=torch.int64)

    out = experts(x, logits, routing, weights, load)

    ids, shares = route(logits, routing)
    for row in range(7):
        wanted = torch.zeros(6)
        for expert, share in zip(ids[row].tolist(), shares[row], strict=True):
            gate, up = (weights.gate_up[expert] @ x[row]).chunk(2)
            wanted += share * (weights.down[expert] @ (torch.nn.functional.silu(gate) * up))
        assert torch.allclose(out[row], wanted, atol=1e-4)
    assert (load - 1).tolist() == ids.flatten().bincount(minlength=4).tolist()
