"""Second stage: sapling learns to answer questions about pictures; the tower stays as it is.

python -m tools.train.vision --tower build/vision/tower.safetensors
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from tools.train.data import mix
from tools.train.data.base import Example
from tools.train.evaluate import ASSETS
from tools.train.model import rotary_tables
from tools.train.optim import make_optimisers
from tools.train.vision import questions
from tools.train.vision.labels import Reading
from tools.train.vision.model import SaplingVision, VisionConfig
from tools.train.vision.rows import (
    Amounts,
    Encoder,
    Part,
    Read,
    Seen,
    Steps,
    as_drawn,
    read_part,
    seen_part,
)
from tools.train.vision.tokens import load_tokenizer

WEIGHTS_FILE = "average.safetensors"


@dataclass
class TrainConfig:
    """How to train: everything follows the number of the step, never a clock.

    If `told`, pictures are what the drawing tool knows of them, so that no tower is needed yet.
    """

    seed: int = 1
    steps: int = 1500
    shapes: int = 8
    words: int = 8
    texts: int = 6
    matrix_lr: float = 0.01
    embedding_lr: float = 0.002
    norm_lr: float = 0.0005
    weight_decay: float = 0.01
    warmup_steps: int = 40
    decay_from: float = 0.4
    average: float = 0.99
    check_every: int = 250
    save_every: int = 100
    check_per_class: int = 20
    workers: int = 1
    told: bool = False
    device: str = "cpu"


def schedule(step: int, steps: int, warmup: int, decay_from: float) -> float:
    """Learning-rate factor: warm-up, constant, then linear to almost nothing."""
    left = (1 - step / steps) / (1 - decay_from)
    return min(1.0, (step + 1) / warmup) * max(0.01, min(1.0, left))


def read_tower(model: SaplingVision, file: Path) -> None:
    """Take over what the first stage learnt."""
    parts = {
        "tower.": model.vision_tower["vision_model"],
        "projector.": model.multi_modal_projector,
    }
    tensors = load_file(file)
    for start, part in parts.items():
        names = [name for name in tensors if name.startswith(start)]
        part.load_state_dict({name.removeprefix(start): tensors[name] for name in names})


class Trainer:
    """State of a run."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        start: Path | None = None,
    ) -> None:
        torch.manual_seed(config.seed)
        self.config, self.folder = config, folder
        self.device = torch.device(config.device)
        self.shape = VisionConfig()
        model = SaplingVision(self.shape)
        if start is None:
            model.read_sapling(load_file(ASSETS / "model.safetensors"))
        else:
            wide = {name: tensor.float() for name, tensor in load_file(start).items()}
            model.load_state_dict(wide)
        self.model = model.to(self.device)
        self.average = copy.deepcopy(self.model)
        self.optimisers = make_optimisers(
            self.model.language_model,
            config.matrix_lr,
            config.embedding_lr,
            config.norm_lr,
            config.weight_decay,
        )
        self.step, self.trained_s = 0, 0.0
        self.tokenizer = load_tokenizer()
        self.reading = Reading(config.device)

    def save(self) -> None:
        """Write a checkpoint from which training continues as if it had never stopped."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step,
            "trained_s": self.trained_s,
            "config": asdict(self.config),
        }
        torch.save(state, self.folder / "writing.pt")
        (self.folder / "writing.pt").replace(self.folder / "last.pt")

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.trained_s = state["step"], state["trained_s"]

    def take_tower(self, file: Path) -> None:
        """Take over what the first stage learnt."""
        for model in (self.model, self.average):
            read_tower(model, file)

    def export(self, folder: Path) -> None:
        """Write the averaged weights in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for name, tensor in self.average.state_dict().items()
        }
        save_file(tensors, str(folder / WEIGHTS_FILE), metadata={"steps": str(self.step)})

    def _scores(self, model: SaplingVision, part: Part) -> tuple[Tensor, Tensor]:
        """Logits where something is learnt, and the tokens wanted there."""
        if isinstance(part, Read):
            tables = rotary_tables(torch.arange(part.tokens.shape[1]), model.language_model.config)
            on_device = tuple(table.to(self.device) for table in tables)
            hidden = [model.language_model.model(part.tokens.to(self.device), on_device)]
            targets = [part.targets]
        else:
            asked = [self._tensor(tokens) for tokens, _ in part.asked]
            targets = [torch.from_numpy(wanted) for _, wanted in part.asked]
            hidden = model.hidden(self._tensor(part.before), self._vectors(model, part), asked)
        kept = [
            rows[(wanted >= 0).to(self.device)]
            for rows, wanted in zip(hidden, targets, strict=True)
        ]
        said = torch.cat([wanted[wanted >= 0] for wanted in targets]).to(self.device)
        return model.language_model.head(torch.cat(kept)), said

    def _vectors(self, model: SaplingVision, part: Seen) -> Tensor:
        """Tokens of pictures: of the tower, or if `told`, roughly those that it should give."""
        if not self.config.told or part.said is None:
            return model.vectors(self._tensor(part.pixels))
        rows = self.reading.meant(self._tensor(part.said).long())
        loud = 1 + 0.15 * torch.randn(*rows.shape[:2], 1, device=self.device)
        return rows * loud + 0.4 * torch.randn_like(rows)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def train_step(self, parts: list[Part]) -> dict[str, Tensor]:
        """One step of the optimisers; mean losses of pictures and texts."""
        learnt = {"seen": 0, "read": 0}
        for part in parts:
            learnt[_kind_of(part)] += _learnt(part)
        sums: dict[str, Tensor] = {}
        for part in parts:
            kind = _kind_of(part)
            logits, wanted = self._scores(self.model, part)
            loss = F.cross_entropy(logits, wanted, reduction="sum") / learnt[kind]
            loss.backward()
            sums[kind] = sums.get(kind, torch.zeros((), device=self.device)) + loss.detach()
        config = self.config
        factor = schedule(self.step, config.steps, config.warmup_steps, config.decay_from)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group.setdefault("full_lr", group["lr"])
                group["lr"] = group["full_lr"] * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            keep = min(config.average, (self.step + 1) / (self.step + 10))
            mine = list(self.average.language_model.parameters())
            torch._foreach_lerp_(mine, list(self.model.language_model.parameters()), 1 - keep)
        self.step += 1
        return sums

    def run(self, until: int | None = None) -> None:
        """Train to the last step, or to step `until`."""
        config = self.config
        stop = config.steps if until is None else min(until, config.steps)
        began = since = time.monotonic()
        recent: list[dict[str, Tensor]] = []
        for parts in self._parts():
            if self.step >= stop:
                break
            recent.append(self.train_step(parts))
            if self.step % 50 == 0:
                means = {
                    name: float(torch.stack([one[name] for one in recent]).mean())
                    for name in recent[0]
                }
                _check_finite(means, self.step)
                now = time.monotonic()
                said = " ".join(f"{name} {mean:.4f}" for name, mean in means.items())
                each = 1000 * (now - since) / len(recent)
                print(f"step {self.step} of {config.steps} {said} {each:.0f} ms a step", flush=True)
                since, recent = now, []
            if self.step % config.check_every == 0 and self.step < config.steps:
                self.check("dev", config.check_per_class)
                since = time.monotonic()
            if self.step % config.save_every == 0:
                self.save()
        self.trained_s += time.monotonic() - began
        self.save()

    def check(self, split: str, per_class: int) -> dict[str, float]:
        """Accuracy of the averaged model by class: answers that it would write token by token."""
        seen = questions.evaluation_set(self.config.seed, per_class, split)
        read = mix.evaluation_set(self.config.seed, per_class, split)
        found: dict[str, list[bool]] = {}
        for examples, size in ((_by_system(seen), 60), (read, 35)):
            for chosen in _batches(examples, size):
                for example, right in zip(chosen, self._right(chosen), strict=True):
                    found.setdefault(example.kind, []).append(right)
        table = {kind: sum(rights) / len(rights) for kind, rights in found.items()}
        for name, examples in (("seen", seen), ("read", read)):
            kinds = {example.kind for example in examples}
            table[name] = sum(table[kind] for kind in kinds) / len(kinds)
        said = " ".join(f"{kind}={value:.3f}" for kind, value in table.items())
        print(f"{split} {said}", flush=True)
        return table

    @torch.no_grad()
    def _right(self, examples: list[Example]) -> list[bool]:
        """Whether every token of an answer is the likeliest one after those before it."""
        if examples[0].image:
            part: Part = seen_part(Encoder(self.tokenizer), examples, self.shape)
            targets = torch.from_numpy(part.asked[0][1]).flatten(0, 1)
        else:
            part = read_part(self.tokenizer, examples)
            targets = part.targets
        logits, wanted = self._scores(self.average, part)
        rows = (targets >= 0).nonzero()[:, 0]
        missed = set(rows[(logits.argmax(-1) != wanted).cpu()].tolist())
        return [row not in missed for row in range(len(examples))]

    def _parts(self) -> Iterator[list[Part]]:
        """Training data from the present step on."""
        config = self.config
        loader = DataLoader(
            Steps(config.seed, Amounts(config.shapes, config.words, config.texts), self.shape),
            batch_size=None,
            sampler=range(self.step, 10**9),
            num_workers=config.workers,
            prefetch_factor=4 if config.workers else None,
            multiprocessing_context="forkserver" if config.workers else None,
            collate_fn=as_drawn,
        )
        yield from loader


def _kind_of(part: Part) -> str:
    return "read" if isinstance(part, Read) else "seen"


def _learnt(part: Part) -> int:
    """Tokens that are learnt from."""
    if isinstance(part, Read):
        return int((part.targets >= 0).sum())
    return sum(int((targets >= 0).sum()) for _, targets in part.asked)


def _by_system(examples: list[Example]) -> list[Example]:
    """Examples with the same system prompt, and none, next to each other."""
    return sorted(examples, key=lambda one: [said["content"] for said in one.messages[:-2]])


def _batches(examples: list[Example], size: int) -> Iterator[list[Example]]:
    """Examples in their order, those of a batch with the same system prompt if about pictures."""

    def same(one: Example) -> object:
        return one.image is not None and [said["content"] for said in one.messages[:-2]]

    for _, group in itertools.groupby(examples, same):
        alike = list(group)
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def _check_finite(means: dict[str, float], step: int) -> None:
    if not all(map(math.isfinite, means.values())):
        raise FloatingPointError(f"the loss of step {step} is {means}: nothing to continue from")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    usual = TrainConfig()
    parser = argparse.ArgumentParser(description="Train sapling-vision from sapling.")
    parser.add_argument("--device", default=usual.device, help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--seed", type=int, default=usual.seed)
    for name in ("shapes", "words", "texts"):
        usually = getattr(usual, name)
        parser.add_argument(f"--{name}", type=int, default=usually, help="of each step")
    parser.add_argument("--matrix-lr", type=float, default=usual.matrix_lr)
    parser.add_argument("--decay-from", type=float, default=usual.decay_from, help="part of a run")
    parser.add_argument("--told", action="store_true", help="by the drawing tool, no tower yet")
    parser.add_argument("--tower", type=Path, help="weights of the first stage")
    parser.add_argument("--workers", type=int, default=usual.workers)
    parser.add_argument("--check-every", type=int, default=usual.check_every)
    parser.add_argument("--check-per-class", type=int, default=usual.check_per_class)
    parser.add_argument("--work", type=Path, default=Path("build/vision"), help="checkpoints")
    parser.add_argument("--output", type=Path, default=Path("build/vision"), help="weights")
    parser.add_argument("--start", type=Path, help="begin with these weights, not with sapling's")
    parser.add_argument(
        "--resume", type=Path, help="continue from this checkpoint; exactly, if --steps is the same"
    )
    given = vars(parser.parse_args(arguments))
    names = ("work", "output", "resume", "start", "tower")
    work, output, resume, start, tower = (given.pop(name) for name in names)
    trainer = Trainer(TrainConfig(**given), work, start)
    if resume:
        trainer.load(resume)
    if tower:
        trainer.take_tower(tower)
    trainer.run()
    trainer.export(output)
    device = torch.cuda.get_device_name() if given["device"] == "cuda" else "cpu"
    print(f"{trainer.step} steps in {trainer.trained_s:.0f} s on {device}", flush=True)
    trainer.check("test", 4 * trainer.config.check_per_class)


if __name__ == "__main__":
    main()
