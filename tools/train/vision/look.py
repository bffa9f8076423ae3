"""First stage: the tower alone learns what stands in each patch, which the drawing tool knows.

No language model runs, and every mark of a picture teaches, so a picture costs little and is worth
much. The heads are left behind.

python -m tools.train.vision.look --minutes 20 --output build/vision/tower.safetensors
"""

from __future__ import annotations

import argparse
import itertools
import random
import string
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tools.train.evaluate import ASSETS
from tools.train.model import ModelConfig
from tools.train.optim import Muon
from tools.train.vision import questions
from tools.train.vision.draw import BAR, COLOURS, SHAPES, Drawn, installed_fonts
from tools.train.vision.model import Projector, Tower, VisionConfig, begin_tower
from tools.train.vision.rows import load_tokenizer, pixels_of

NAMES = ("", *SHAPES, BAR, *string.digits, *string.ascii_letters)
HUES = ("", *COLOURS)
LAYERS = 3
"""Layers of the tower that learn here; the rest learns with sapling."""

Looked = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Pictures (N, side, side, 3), names (N, patches, 2) and colours (N, patches) as bytes."""


def labels_of(drawn: Drawn, config: VisionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Names of marks by patch and half of the patch, where their centres are, and colours."""
    side = config.image_size // config.patch_size
    names = np.zeros((side * side, 2), np.uint8)
    hues = np.zeros(side * side, np.uint8)
    for mark in drawn.marks:
        row = min(side - 1, max(0, int(mark.y * side)))
        half = min(2 * side - 1, max(0, int(mark.x * 2 * side)))
        patch = row * side + half // 2
        names[patch, half % 2] = NAMES.index(mark.name)
        if mark.colour:
            hues[patch] = HUES.index(mark.colour)
    return names, hues


class Pictures(Dataset[Looked]):
    """Batches by number, the same whoever draws them."""

    def __init__(self, seed: int, size: int, config: VisionConfig) -> None:
        self.seed, self.size, self.config = seed, size, config
        self.fonts = installed_fonts()

    def __getitem__(self, index: int) -> Looked:
        rng = random.Random(f"{self.seed}:look:{index}")
        drawn = [questions.dense(rng, self.fonts) for _ in range(self.size)]
        labels = [labels_of(one, self.config) for one in drawn]
        return (
            np.stack([pixels_of(one.image, self.config.image_size) for one in drawn]),
            np.stack([names for names, _ in labels]),
            np.stack([hues for _, hues in labels]),
        )


def meanings() -> tuple[Tensor, Tensor]:
    """Sapling's embeddings of names and of colours; nothing there reads like a line break."""
    table = load_file(ASSETS / "model.safetensors")["model.embed_tokens.weight"].float()
    tokenizer = load_tokenizer()

    def of(text: str) -> Tensor:
        return table[tokenizer.encode(text, add_special_tokens=False).ids].mean(0)

    names = torch.stack([of(f" {one}" if len(one) > 1 else one or "\n") for one in NAMES])
    hues = torch.stack([of(f" {one}") if one else torch.zeros(len(table[0])) for one in HUES])
    return names, hues


class Looking(nn.Module):
    """The tower's first layers, heads for names and colours, and the projector.

    The projector begins to say in sapling's own embeddings what the tower sees.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.tower = Tower(config)
        self.projector = Projector(config, ModelConfig().hidden_size)
        begin_tower(self.tower)
        begin_tower(self.projector)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.names = nn.Linear(config.hidden_size, 2 * len(NAMES))
        self.hues = nn.Linear(config.hidden_size, len(HUES))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (N, patches, 2, names) and (N, patches, colours), and vectors for sapling."""
        scaled = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = self.tower(scaled, LAYERS)
            x = self.norm(rows)
            names, hues = self.names(x), self.hues(x)
            vectors = self.projector(rows)
        return names.float().unflatten(-1, (2, -1)), hues.float(), vectors.float()


Scores = tuple[Tensor, Tensor, Tensor]


class Loss:
    """What the heads and the projector get wrong; the many places without a mark weigh little."""

    def __init__(self) -> None:
        self._names, self._hues = meanings()
        self._few = torch.ones(len(NAMES)), torch.ones(len(HUES))
        self._few[0][0], self._few[1][0] = 0.1, 0.02

    def __call__(self, scores: Scores, names: Tensor, hues: Tensor) -> Tensor:
        """The sum of the means."""
        said, coloured, vectors = scores
        named = F.cross_entropy(said.flatten(0, 2), names.flatten(), weight=self._few[0])
        hued = F.cross_entropy(coloured.flatten(0, 1), hues.flatten(), weight=self._few[1])
        marked = (names > 0).any(-1)
        meant = (self._names[names] * (names > 0)[..., None]).sum(2) + self._hues[hues]
        meant = torch.where(marked[..., None], meant, self._names[0])
        apart = (vectors - meant).square().mean(-1)
        weights = torch.where(marked, 1.0, 0.1)
        return named + 0.5 * hued + 0.5 * (apart * weights).sum() / weights.sum()


@torch.no_grad()
def right_of(scores: Scores, names: Tensor, hues: Tensor) -> dict[str, float]:
    """Shares of shapes, characters, empty places and colours that are right."""
    found = scores[0].argmax(-1) == names
    kinds = {
        "shapes": (names > 0) & (names <= len(SHAPES)),
        "digits": (names > len(SHAPES) + 1) & (names <= len(SHAPES) + 11),
        "letters": names > len(SHAPES) + 11,
        "empty": names == 0,
    }
    shares = {kind: float(found[of].float().mean()) for kind, of in kinds.items()}
    shares["colours"] = float((scores[1].argmax(-1) == hues)[hues > 0].float().mean())
    return shares


def batches(seed: int, size: int, times: int, config: VisionConfig) -> Iterator[list[Tensor]]:
    """Batches for ever, each several times, some steps apart."""
    loader = DataLoader(
        Pictures(seed, size, config),
        batch_size=None,
        sampler=range(10**9),
        num_workers=1,
        prefetch_factor=16,
        multiprocessing_context="forkserver",
        collate_fn=_as_drawn,
    )
    drawn = iter(loader)
    while True:
        block: list[list[Tensor]] = []
        for pixels, names, hues in itertools.islice(drawn, 8):
            labels = torch.from_numpy(names).long(), torch.from_numpy(hues).long()
            block.append([torch.from_numpy(pixels), *labels])
        for _ in range(times):
            yield from block


def _as_drawn(looked: Looked) -> Looked:
    return looked


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the tower alone.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--times", type=int, default=2, help="uses of a drawn batch")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--output", type=Path, default=Path("build/vision/tower.safetensors"))
    given = parser.parse_args(arguments)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(given.seed)
    config = VisionConfig()
    model = Looking(config)
    if given.start:
        model.load_state_dict(load_file(given.start), strict=False)
    learnt = [p for name, p in model.named_parameters() if ".3." not in name and p.requires_grad]
    matrices = [p for p in learnt if p.dim() == 2 and p.shape[0] >= 192]
    small = [p for p in learnt if all(p is not one for one in matrices)]
    optimisers: list[torch.optim.Optimizer] = [
        Muon(matrices, given.lr, weight_decay=0.01),
        torch.optim.AdamW(small, 0.003, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    loss_of = Loss()
    since, losses = time.process_time(), []
    drawn = batches(given.seed, given.batch, given.times, config)
    for step in range(given.steps):
        pixels, names, hues = next(drawn)
        factor = min(1.0, (step + 1) / 40) * max(0.02, min(1.0, (1 - step / given.steps) / 0.5))
        scores = model(pixels)
        loss = loss_of(scores, names, hues)
        loss.backward()
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group.setdefault("full_lr", group["lr"])
                group["lr"] = group["full_lr"] * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            shares = " ".join(f"{k} {v:.3f}" for k, v in right_of(scores, names, hues).items())
            each = 1000 * (time.process_time() - since) / 50
            mean = sum(losses) / len(losses)
            print(f"step {step + 1} loss {mean:.3f} {shares} {each:.0f} ms", flush=True)
            since, losses = time.process_time(), []
        if (step + 1) % 200 == 0:
            save_file(model.state_dict(), str(given.output))
    save_file(model.state_dict(), str(given.output))


if __name__ == "__main__":
    main()
