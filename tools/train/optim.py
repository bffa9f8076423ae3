"""Muon for the matrices inside the layers, AdamW for embeddings and norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest orthogonal matrices by Newton-Schulz iteration, in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.to(torch.bfloat16)
    wide = x.shape[-2] > x.shape[-1]
    if wide:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        powers = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, powers, x, beta=a)
    return (x.mT if wide else x).to(stack.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates; matrices of the same shape are processed together."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            shapes: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append(parameter)
            for shape, members in shapes.items():
                updates: list[Tensor] = []
                for parameter in members:
                    state = self.state[parameter]
                    if not state:
                        state["velocity"] = torch.zeros_like(parameter)
                    velocity: Tensor = state["velocity"]
                    velocity.lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(velocity, group["momentum"]))
                steps = orthogonalise(torch.stack(updates))
                size = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(members, steps, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * size)


def make_optimisers(
    model: nn.Module, matrix_lr: float, embedding_lr: float, norm_lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices: list[nn.Parameter] = []
    embeddings: list[nn.Parameter] = []
    norms: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            norms.append(parameter)
        else:
            (embeddings if "embed" in name else matrices).append(parameter)
    groups = [{"params": embeddings, "lr": embedding_lr}, {"params": norms, "lr": norm_lr}]
    return [
        Muon(matrices, matrix_lr, weight_decay=weight_decay),
        torch.optim.AdamW(groups, betas=(0.9, 0.97), weight_decay=0.0),
    ]
