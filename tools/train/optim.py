"""Muon for the matrices inside the layers, AdamW for embeddings and norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices, in bfloat16."""
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
    """Momentum whose update is orthogonalised; matrices of one shape are handled together.

    Workers that hold the same gradients each orthogonalise a part and tell the others.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        rank: int = 0,
        workers: int = 1,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._rank, self._workers = rank, workers

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            members = [one for one in group["params"] if one.grad is not None]
            updates = self._orthogonal([self._moved(one, group["momentum"]) for one in members])
            for parameter, update in zip(members, updates, strict=True):
                size = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * size)

    def _moved(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """The gradient, led on by what came before (Nesterov)."""
        state = self.state[parameter]
        if not state:
            state["velocity"] = torch.zeros_like(parameter)
        gradient = parameter.grad
        assert gradient is not None
        velocity: Tensor = state["velocity"]
        velocity.lerp_(gradient, 1 - momentum)
        return gradient.lerp(velocity, momentum)

    def _orthogonal(self, moved: list[Tensor]) -> list[Tensor]:
        shapes: defaultdict[torch.Size, list[int]] = defaultdict(list)
        for index, one in enumerate(moved):
            shapes[one.shape].append(index)
        flat = torch.zeros(sum(one.numel() for one in moved))
        found = [
            part.view(one.shape)
            for part, one in zip(flat.split([one.numel() for one in moved]), moved, strict=True)
        ]
        for indices in shapes.values():
            if not (mine := indices[self._rank :: self._workers]):
                continue
            steps = orthogonalise(torch.stack([moved[index] for index in mine]))
            for index, step in zip(mine, steps, strict=True):
                found[index].copy_(step)
        if self._workers > 1:
            distributed.all_reduce(flat)  # all but one of what is added up are zero
        return found


def make_optimisers(
    model: nn.Module,
    matrix_lr: float,
    embedding_lr: float,
    norm_lr: float,
    weight_decay: float,
    *,
    rank: int = 0,
    workers: int = 1,
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
        Muon(matrices, matrix_lr, weight_decay=weight_decay, rank=rank, workers=workers),
        torch.optim.AdamW(groups, betas=(0.9, 0.97), weight_decay=0.0),
    ]
