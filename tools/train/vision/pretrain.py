"""First stage: the tower alone learns what stands in each patch, which the drawing tool knows.

No language model runs, and every mark of a picture teaches, so a picture costs little and is worth
much. The heads are left behind.

python -m tools.train.vision.pretrain --output build/vision/tower.safetensors
"""

from __future__ import annotations

import argparse
import itertools
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from tools.train.vision.run import schedule

MARK_LABELS = ("", *SHAPES, BAR, *string.digits, *string.ascii_letters)
COLOUR_LABELS = ("", *COLOURS)
LAYERS = 3
"""Layers of the tower that learn here; the rest learns with sapling."""

LabelledBatch = tuple[np.ndarray, np.ndarray, np.ndarray]
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
        names[patch, half % 2] = MARK_LABELS.index(mark.name)
        if mark.colour:
            hues[patch] = COLOUR_LABELS.index(mark.colour)
    return names, hues


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
        drawn = [questions.dense(rng, self.fonts) for _ in range(self.size)]
        labels = [labels_of(one, self.config) for one in drawn]
        return (
            np.stack([pixels_of(one.image, self.config.image_size) for one in drawn]),
            np.stack([names for names, _ in labels]),
            np.stack([hues for _, hues in labels]),
        )


def embeddings() -> tuple[Tensor, Tensor]:
    """Sapling's embeddings of names and of colours; nothing there reads like a line break."""
    table = load_file(ASSETS / "model.safetensors")["model.embed_tokens.weight"].float()
    tokenizer = load_tokenizer()

    def of(text: str) -> Tensor:
        return table[tokenizer.encode(text, add_special_tokens=False).ids].mean(0)

    names = torch.stack([of(f" {one}" if len(one) > 1 else one or "\n") for one in MARK_LABELS])
    hues = torch.stack(
        [of(f" {one}") if one else torch.zeros(len(table[0])) for one in COLOUR_LABELS]
    )
    return names, hues


class PatchLabeller(nn.Module):
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
        self.names = nn.Linear(config.hidden_size, 2 * len(MARK_LABELS))
        self.hues = nn.Linear(config.hidden_size, len(COLOUR_LABELS))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (N, patches, 2, names) and (N, patches, colours), and vectors for sapling."""
        scaled = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.autocast(pixels.device.type, dtype=torch.bfloat16):
            rows = self.tower(scaled, LAYERS)
            x = self.norm(rows)
            names, hues = self.names(x), self.hues(x)
            vectors = self.projector(rows)
        return names.float().unflatten(-1, (2, -1)), hues.float(), vectors.float()


Scores = tuple[Tensor, Tensor, Tensor]


class Loss:
    """Loss of the heads and the projector; the many places without a mark weigh little."""

    def __init__(self, device: str = "cpu") -> None:
        self.embeddings = tuple(table.to(device) for table in embeddings())
        few = torch.ones(len(MARK_LABELS)), torch.ones(len(COLOUR_LABELS))
        few[0][0], few[1][0] = 0.1, 0.02
        self._few = tuple(one.to(device) for one in few)

    def __call__(self, scores: Scores, names: Tensor, hues: Tensor) -> Tensor:
        """The sum of the means."""
        said, coloured, vectors = scores
        named = F.cross_entropy(said.flatten(0, 2), names.flatten(), weight=self._few[0])
        hued = F.cross_entropy(coloured.flatten(0, 1), hues.flatten(), weight=self._few[1])
        marked = (names > 0).any(-1)
        of_names, of_hues = self.embeddings
        meant = (of_names[names] * (names > 0)[..., None]).sum(2) + of_hues[hues]
        meant = torch.where(marked[..., None], meant, of_names[0])
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
        block = [_placed(labelled, config.device) for labelled in itertools.islice(drawn, 8)]
        for _ in range(config.times):
            yield from block


def _placed(labelled: LabelledBatch, device: str) -> list[Tensor]:
    pixels, names, hues = (torch.from_numpy(part) for part in labelled)
    return [part.to(device) for part in (pixels, names.long(), hues.long())]


def _as_drawn(labelled: LabelledBatch) -> LabelledBatch:
    return labelled


def optimisers_of(model: PatchLabeller, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest; of the layers that do not run, none."""
    idle = tuple(f"tower.encoder.layers.{n}." for n in range(LAYERS, len(model.tower.layers)))
    matrices: list[nn.Parameter] = []
    small: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.startswith(idle):
            plain = name.startswith(("tower.encoder", "projector")) and parameter.dim() == 2
            (matrices if plain else small).append(parameter)
    adam = torch.optim.AdamW(small, 0.15 * lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [Muon(matrices, lr, weight_decay=0.01), adam]


def train(model: PatchLabeller, config: PretrainConfig, output: Path) -> None:
    """Train, and write the weights now and then, and at the end."""
    loss_of = Loss(config.device)
    optimisers = optimisers_of(model, config.lr)
    losses: list[float] = []
    drawn = batches(config, model.tower.config)
    for step in range(config.steps):
        pixels, names, hues = next(drawn)
        scores = model(pixels)
        loss = loss_of(scores, names, hues)
        loss.backward()
        factor = schedule(step, config.steps, 40, 0.5)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group.setdefault("full_lr", group["lr"])
                group["lr"] = group["full_lr"] * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if (step + 1) % 50 == 0:
            shares = as_text(right_of(scores, names, hues))
            print(f"step {step + 1} loss {sum(losses[-50:]) / 50:.3f} {shares}", flush=True)
        if (step + 1) % 200 == 0 or step + 1 == config.steps:
            save_file(model.state_dict(), str(output))


@torch.no_grad()
def check(model: PatchLabeller, seed: int, count: int, fonts: Sequence[str]) -> dict[str, float]:
    """Shares that are right in pictures of the questions that are held out."""
    device = next(model.parameters()).device
    rng = random.Random(f"{seed}:check")
    names_of = list(questions.SUBJECTS)
    subjects = [questions.subject(names_of[n % 6], rng, "test") for n in range(count)]
    drawn = [subject.draw(rng, fonts) for subject in subjects]
    shape = model.tower.config
    labels = [labels_of(one, shape) for one in drawn]
    labelled = (
        np.stack([pixels_of(one.image, shape.image_size) for one in drawn]),
        np.stack([names for names, _ in labels]),
        np.stack([hues for _, hues in labels]),
    )
    pixels, names, hues = _placed(labelled, str(device))
    parts = [model(few) for few in pixels.split(128)]
    whole = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    return right_of((whole[0], whole[1], whole[2]), names, hues)


def as_text(shares: dict[str, float]) -> str:
    """Shares as a line of a log."""
    return " ".join(f"{kind} {share:.3f}" for kind, share in shares.items())


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
            shares = as_text(check(model, config.seed, 1200, fonts))
            print(f"{'other' if held_out else 'trained'} fonts: {shares}", flush=True)


if __name__ == "__main__":
    main()
