"""First stage: tower and projector learn what each patch should say.

The drawing tool knows it: the mark in the patch, its colour, place and order, what its bar shows.
No language model runs, and every mark of a picture teaches, so a picture costs little and is worth
much. The heads are left behind.

python -m tools.train.vision.pretrain --output build/vision/tower.safetensors
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tools.train.model import ModelConfig
from tools.train.optim import Muon
from tools.train.vision import questions
from tools.train.vision.draw import Drawn, installed_fonts
from tools.train.vision.labels import (
    COLOUR_LABELS,
    MARK_LABELS,
    WORDS,
    Reading,
    labels_of,
)
from tools.train.vision.model import Projector, Tower, VisionConfig, begin_tower
from tools.train.vision.rows import pixels_of
from tools.train.vision.run import schedule

LOOKING = 3
"""Layers of the tower after which the heads look; the last one relates marks to each other."""

LabelledBatch = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Pictures (N, side, side, 3), and their `labels_of`."""


@dataclass
class PretrainConfig:
    """How to train; a drawn batch is used `times` times."""

    steps: int = 1500
    batch: int = 64
    times: int = 2
    lr: float = 0.02
    seed: int = 1
    workers: int = 1
    device: str = "cpu"


class LabelledPictures(Dataset[LabelledBatch]):
    """Batches by number, the same whoever draws them."""

    def __init__(self, seed: int, size: int, config: VisionConfig) -> None:
        self.seed, self.size, self.config = seed, size, config
        self.fonts = installed_fonts()

    def __getitem__(self, index: int) -> LabelledBatch:
        rng = random.Random(f"{self.seed}:pretrain:{index}")
        return labelled([questions.dense(rng, self.fonts) for _ in range(self.size)], self.config)


def labelled(drawn: Sequence[Drawn], config: VisionConfig) -> LabelledBatch:
    """Pictures and their labels."""
    labels = [labels_of(one, config) for one in drawn]
    pixels = np.stack([pixels_of(one.image, config.image_size) for one in drawn])
    names, hues, said = (np.stack(column) for column in zip(*labels, strict=True))
    return pixels, names, hues, said


class PatchLabeller(nn.Module):
    """The tower with the projector, and heads for names and colours after some layers.

    The projector says in sapling's own embeddings what the tower sees.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.tower = Tower(config)
        self.projector = Projector(config, ModelConfig().hidden_size)
        begin_tower(self.tower)
        begin_tower(self.projector)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.names = nn.Linear(config.hidden_size, 2 * len(MARK_LABELS))
        self.hues = nn.Linear(config.hidden_size, len(COLOUR_LABELS))

    def forward(self, pixels: Tensor) -> Scores:
        """Scores of names (N, patches, 2, names), of colours, and vectors (N, patches, width)."""
        scaled = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.autocast(pixels.device.type, dtype=torch.bfloat16):
            rows = self.tower.embeddings(scaled)
            for layer in self.tower.layers[:LOOKING]:
                rows = layer(rows)
            x = self.norm(rows)
            names, hues = self.names(x), self.hues(x)
            for layer in self.tower.layers[LOOKING:]:
                rows = layer(rows)
            vectors = self.projector(rows)
        return names.float().unflatten(-1, (2, -1)), hues.float(), vectors.float()


Scores = tuple[Tensor, Tensor, Tensor]


class Loss:
    """Loss of the heads and the projector; the many places without a mark weigh little."""

    def __init__(self, device: str = "cpu") -> None:
        self.reading = Reading(device)
        self._empty = 1 + WORDS.index("\n")
        few = torch.ones(len(MARK_LABELS)), torch.ones(len(COLOUR_LABELS))
        few[0][0], few[1][0] = 0.1, 0.02
        self._few = tuple(one.to(device) for one in few)

    def __call__(self, scores: Scores, names: Tensor, hues: Tensor, said: Tensor) -> Tensor:
        """The sum of the means."""
        seen, coloured, vectors = scores
        named = F.cross_entropy(seen.flatten(0, 2), names.flatten(), weight=self._few[0])
        hued = F.cross_entropy(coloured.flatten(0, 1), hues.flatten(), weight=self._few[1])
        apart = (vectors - self.reading.meant(said)).square().mean(-1)
        first = said[..., 0]
        weights = (first > 0) * torch.where(first == self._empty, 0.1, 1.0)
        read = [F.cross_entropy(*pair) for pair in self.reading.scores(vectors, said).values()]
        apart = (apart * weights).sum() / weights.sum()
        return 0.5 * named + 0.25 * hued + apart + 0.5 * torch.stack(read).sum()


@torch.no_grad()
def right_of(reading: Reading, vectors: Tensor, said: Tensor) -> dict[str, tuple[int, int]]:
    """By group of words, how many are said rightly, and of how many."""
    return {
        name: (int((scores.argmax(-1) == wanted).sum()), len(wanted))
        for name, (scores, wanted) in reading.scores(vectors, said).items()
    }


def batches(config: PretrainConfig, shape: VisionConfig) -> Iterator[list[Tensor]]:
    """Batches for ever, each several times, some steps apart."""
    loader = DataLoader(
        LabelledPictures(config.seed, config.batch, shape),
        batch_size=None,
        sampler=range(10**9),
        num_workers=config.workers,
        prefetch_factor=4 if config.workers else None,
        multiprocessing_context="forkserver" if config.workers else None,
        collate_fn=_as_drawn,
    )
    drawn = iter(loader)
    while True:
        block = [_placed(batch, config.device) for batch in itertools.islice(drawn, 8)]
        for _ in range(config.times):
            yield from block


def _placed(batch: LabelledBatch, device: str) -> list[Tensor]:
    pixels, *labels = (torch.from_numpy(part) for part in batch)
    return [part.to(device) for part in (pixels, *(one.long() for one in labels))]


def _as_drawn(batch: LabelledBatch) -> LabelledBatch:
    return batch


def optimisers_of(model: PatchLabeller, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    small: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = name.startswith(("tower.encoder", "projector")) and parameter.dim() == 2
            (matrices if plain else small).append(parameter)
    adam = torch.optim.AdamW(small, 0.15 * lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [Muon(matrices, lr, weight_decay=0.01), adam]


def train(model: PatchLabeller, config: PretrainConfig, output: Path) -> None:
    """Train, and write the weights now and then, and at the end."""
    loss_of = Loss(config.device)
    optimisers = optimisers_of(model, config.lr)
    losses: list[float] = []
    tallies: list[dict[str, tuple[int, int]]] = []
    drawn = batches(config, model.tower.config)
    for step in range(config.steps):
        pixels, names, hues, said = next(drawn)
        scores = model(pixels)
        loss = loss_of(scores, names, hues, said)
        loss.backward()
        factor = schedule(step, config.steps, 40, 0.5)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group.setdefault("full_lr", group["lr"])
                group["lr"] = group["full_lr"] * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        tallies.append(right_of(loss_of.reading, scores[2], said))
        if (step + 1) % 50 == 0:
            mean = sum(losses[-50:]) / 50
            print(f"step {step + 1} loss {mean:.3f} {as_text(tallies[-50:])}", flush=True)
        if (step + 1) % 200 == 0 or step + 1 == config.steps:
            save_file(model.state_dict(), str(output))


@torch.no_grad()
def check(
    model: PatchLabeller, seed: int, count: int, fonts: Sequence[str]
) -> list[dict[str, tuple[int, int]]]:
    """Count what is said rightly in pictures of the questions that are held out."""
    device = str(next(model.parameters()).device)
    reading = Reading(device)
    rng = random.Random(f"{seed}:check")
    names = list(questions.SUBJECTS)
    drawn = [
        questions.subject(names[n % len(names)], rng, "test").draw(rng, fonts) for n in range(count)
    ]
    tallies: list[dict[str, tuple[int, int]]] = []
    for start in range(0, count, 100):
        batch = labelled(drawn[start : start + 100], model.tower.config)
        pixels, _, _, said = _placed(batch, device)
        tallies.append(right_of(reading, model(pixels)[2], said))
    return tallies


def shares(tallies: Sequence[dict[str, tuple[int, int]]]) -> dict[str, float]:
    """Shares that are right, of all batches together."""
    sums: dict[str, tuple[int, int]] = {}
    for tally in tallies:
        for name, (right, of) in tally.items():
            before = sums.get(name, (0, 0))
            sums[name] = before[0] + right, before[1] + of
    return {name: right / of for name, (right, of) in sums.items()}


def as_text(tallies: Sequence[dict[str, tuple[int, int]]]) -> str:
    """Shares as a line of a log."""
    return " ".join(f"{name} {share:.3f}" for name, share in shares(tallies).items())


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    usual = PretrainConfig()
    parser = argparse.ArgumentParser(description="Train the tower alone.")
    for name, value in vars(usual).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--start", type=Path, help="begin with these weights")
    parser.add_argument("--output", type=Path, default=Path("build/vision/tower.safetensors"))
    given = vars(parser.parse_args(arguments))
    start, output = given.pop("start"), given.pop("output")
    config = PretrainConfig(**given)
    output.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    model = PatchLabeller(VisionConfig())
    if start:
        model.load_state_dict(load_file(start))
    train(model.to(config.device), config, output)
    for held_out in (False, True):
        if fonts := installed_fonts(held_out=held_out):
            said = as_text(check(model, config.seed, 1200, fonts))
            print(f"{'other' if held_out else 'trained'} fonts: {said}", flush=True)


if __name__ == "__main__":
    main()
