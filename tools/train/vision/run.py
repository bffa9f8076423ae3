"""Second stage: tower, projector and sapling learn to answer questions about pictures.

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
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tools.train.data import mix
from tools.train.data.base import Example
from tools.train.evaluate import ASSETS
from tools.train.optim import Muon
from tools.train.vision import questions
from tools.train.vision.model import SaplingVision, VisionConfig
from tools.train.vision.rows import (
    Amounts,
    Packer,
    Part,
    Steps,
    as_drawn,
    load_tokenizer,
    seen_part,
    text_part,
)

WEIGHTS_FILE = "average.safetensors"
_BLOCK = 16
_TIMED = 4 * _BLOCK, 10 * _BLOCK
"""With `minutes`, the steps between these tell how many there will be; checks take the rest."""


@dataclass
class TrainConfig:
    """How to train: everything follows the number of the step, never a clock.

    `minutes` only decides the number of steps, once, by the speed of the first ones. Each drawn
    step is trained on `times` times, some steps apart: drawing takes longer than training.
    """

    seed: int = 1
    steps: int = 1500
    minutes: float | None = None
    shapes: int = 16
    words: int = 12
    texts: int = 6
    times: int = 2
    frozen: bool = False
    tower_lr: float = 0.005
    small_lr: float = 0.001
    text_lr: float = 0.004
    embedding_lr: float = 0.001
    weight_decay: float = 0.01
    warmup_steps: int = 40
    decay_from: float = 0.4
    average: float = 0.99
    check_every: int = 250
    save_every: int = 250
    check_per_class: int = 20
    workers: int = 2
    device: str = "cpu"


def schedule(step: int, steps: int, warmup: int, decay_from: float) -> float:
    """Learning-rate factor: warm-up, constant, then linear to almost nothing."""
    left = (1 - step / steps) / (1 - decay_from)
    return min(1.0, (step + 1) / warmup) * max(0.01, min(1.0, left))


def optimisers_of(model: SaplingVision, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest; the text half learns at rates of its own."""
    matrices: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    small: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = parameter.dim() == 2 and "embed" not in name
            (matrices if plain else small)[name.startswith("language_model")].append(parameter)
    muon = Muon(matrices[False], config.tower_lr, weight_decay=config.weight_decay)
    muon.add_param_group({"params": matrices[True], "lr": config.text_lr, "text": True})
    adam = torch.optim.AdamW(
        [
            {"params": small[False], "lr": config.small_lr},
            {"params": small[True], "lr": config.embedding_lr, "text": True},
        ],
        betas=(0.9, 0.97),
        weight_decay=0.0,
    )
    return [muon, adam]


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
        tower: Path | None = None,
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
        if tower is not None:
            read_tower(model, tower)
        model.language_model.requires_grad_(requires_grad=not config.frozen)
        self.model = model.to(self.device)
        self.average = copy.deepcopy(self.model)
        self.optimisers = optimisers_of(self.model, config)
        self.step, self.trained_s = 0, 0.0
        self.tokenizer = load_tokenizer()

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
        """Go on from a checkpoint; its number of steps holds."""
        state = torch.load(path, weights_only=True, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.trained_s = state["step"], state["trained_s"]
        self.config.steps, self.config.minutes = state["config"]["steps"], None

    def export(self, folder: Path) -> None:
        """Write the averaged weights in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for name, tensor in self.average.state_dict().items()
        }
        save_file(tensors, str(folder / WEIGHTS_FILE), metadata={"steps": str(self.step)})

    def _scores(self, model: SaplingVision, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, the tokens wanted there, and the flat positions that are learnt from."""
        flat = part.targets.reshape(-1)
        where = (flat >= 0).nonzero()[0]
        places, wanted = self._tensor(where), self._tensor(flat[where])
        segments = None if part.segments is None else self._tensor(part.segments)
        pixels = None if part.pixels is None else self._tensor(part.pixels)
        return model.logits(self._tensor(part.tokens), places, segments, pixels), wanted, places

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def train_step(self, parts: list[Part]) -> dict[str, Tensor]:
        """One step of the optimisers; mean losses of pictures and texts."""
        counts = {True: 0, False: 0}
        for part in parts:
            counts[part.pixels is not None] += int((part.targets >= 0).sum())
        sums: dict[str, Tensor] = {}
        for part in parts:
            seen = part.pixels is not None
            logits, wanted, _ = self._scores(self.model, part)
            loss = F.cross_entropy(logits, wanted, reduction="sum") / counts[seen]
            loss.backward()
            name = "seen" if seen else "read"
            sums[name] = sums.get(name, torch.zeros((), device=self.device)) + loss.detach()
        config = self.config
        tower = schedule(self.step, config.steps, config.warmup_steps, config.decay_from)
        text = schedule(self.step, config.steps, 2 * config.warmup_steps, config.decay_from)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group.setdefault("full_lr", group["lr"])
                group["lr"] = group["full_lr"] * (text if group.get("text") else tower)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            keep = min(config.average, (self.step + 1) / (self.step + 10))
            mine, theirs = list(self.average.parameters()), list(self.model.parameters())
            torch._foreach_lerp_(mine, theirs, 1 - keep)
        self.step += 1
        return sums

    def run(self, until: int | None = None) -> None:
        """Train to the last step, or to step `until`."""
        config = self.config
        stop = config.steps if until is None else min(until, config.steps)
        began, since = time.monotonic(), time.monotonic()
        at_first = 0.0
        recent: list[dict[str, Tensor]] = []
        for parts in self._parts():
            if self.step >= stop:
                break
            recent.append(self.train_step(parts))
            if self.step == _TIMED[0]:
                at_first = self._now()
            if config.minutes is not None and self.step == _TIMED[1]:
                each = (self._now() - at_first) / (_TIMED[1] - _TIMED[0])
                left = 60 * config.minutes - (time.monotonic() - began)
                config.steps = self.step + max(1, int(0.93 * left / each))
                config.minutes = None
                self._say(f"{1000 * each:.0f} ms a step: {config.steps} steps")
            if self.step % 50 == 0:
                means = {
                    name: float(torch.stack([one[name] for one in recent]).mean())
                    for name in recent[0]
                }
                _check_finite(means, self.step)
                now = self._now()
                said = " ".join(f"{name} {mean:.4f}" for name, mean in means.items())
                each = 1000 * (now - since) / len(recent)
                self._say(f"step {self.step} of {config.steps} {said} {each:.0f} ms a step")
                since, recent = now, []
            if self.step % config.check_every == 0 and self.step < config.steps:
                self.check("dev", config.check_per_class)
                since = self._now()
            if self.step % config.save_every == 0:
                self.save()
            stop = config.steps if until is None else min(until, config.steps)
        self.trained_s += time.monotonic() - began
        self.save()

    def check(self, split: str, per_class: int) -> dict[str, float]:
        """Accuracy of the averaged model by class: answers that it would write token by token."""
        seen = questions.evaluation_set(self.config.seed, per_class, split)
        read = [] if self.config.frozen else mix.evaluation_set(self.config.seed, per_class, split)
        found: dict[str, list[bool]] = {}
        for examples, size in ((seen, 60), (read, 35)):
            for start in range(0, len(examples), size):
                chosen = examples[start : start + size]
                for example, right in zip(chosen, self._right(chosen), strict=True):
                    found.setdefault(example.kind, []).append(right)
        table = {kind: sum(rights) / len(rights) for kind, rights in found.items()}
        for name, examples in (("seen", seen), ("read", read)):
            if kinds := {example.kind for example in examples}:
                table[name] = sum(table[kind] for kind in kinds) / len(kinds)
        self._say(f"{split} " + " ".join(f"{kind}={value:.3f}" for kind, value in table.items()))
        return table

    @torch.no_grad()
    def _right(self, examples: list[Example]) -> list[bool]:
        """Whether every token of an answer is the likeliest one after those before it."""
        if examples[0].image:
            part = seen_part(Packer(self.tokenizer, self.shape), examples, self.shape)
        else:
            part = text_part(self.tokenizer, examples)
        logits, wanted, where = self._scores(self.average, part)
        rows = where[logits.argmax(-1) != wanted] // part.tokens.shape[1]
        missed = set(rows.tolist())
        return [row not in missed for row in range(len(examples))]

    def _parts(self) -> Iterator[list[Part]]:
        """Training data of later steps: blocks of drawn steps, each several times."""
        config, step = self.config, self.step
        block, passed = divmod(step, _BLOCK * config.times)
        loader = DataLoader(
            Steps(config.seed, Amounts(config.shapes, config.words, config.texts), self.shape),
            batch_size=None,
            sampler=range(block * _BLOCK, 10**9),
            num_workers=config.workers,
            prefetch_factor=4 if config.workers else None,
            multiprocessing_context="forkserver" if config.workers else None,
            collate_fn=as_drawn,
        )
        drawn = iter(loader)
        while True:
            kept = list(itertools.islice(drawn, _BLOCK))
            yield from (kept * config.times)[passed:]
            passed = 0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    def _say(self, text: str) -> None:
        print(text, flush=True)


def _check_finite(means: dict[str, float], step: int) -> None:
    if not all(map(math.isfinite, means.values())):
        raise FloatingPointError(f"the loss of step {step} is {means}: nothing to continue from")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    usual = TrainConfig()
    parser = argparse.ArgumentParser(description="Train sapling-vision from sapling.")
    parser.add_argument("--device", default=usual.device, help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--minutes", type=float, help="as many steps as fit, instead of --steps")
    parser.add_argument("--seed", type=int, default=usual.seed)
    for name in ("shapes", "words", "texts"):
        usually = getattr(usual, name)
        parser.add_argument(f"--{name}", type=int, default=usually, help="rows of a step")
    parser.add_argument("--frozen", action="store_true", help="leave sapling as it is")
    parser.add_argument("--tower", type=Path, help="weights of the first stage")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--check-every", type=int, default=usual.check_every)
    parser.add_argument("--check-per-class", type=int, default=usual.check_per_class)
    parser.add_argument("--work", type=Path, default=Path("build/vision"), help="checkpoints")
    parser.add_argument("--output", type=Path, default=Path("build/vision"), help="weights")
    parser.add_argument("--start", type=Path, help="begin with these weights, not with sapling's")
    parser.add_argument("--times", type=int, default=usual.times, help="uses of a drawn step")
    parser.add_argument("--resume", type=Path, help="continue exactly from this checkpoint")
    given = vars(parser.parse_args(arguments))
    names = ("work", "output", "resume", "start", "tower")
    work, output, resume, start, tower = (given.pop(name) for name in names)
    trainer = Trainer(TrainConfig(**given), work, start, tower)
    if resume:
        trainer.load(resume)
    trainer.run()
    trainer.export(output)
    device = torch.cuda.get_device_name() if given["device"] == "cuda" else "cpu"
    print(f"{trainer.step} steps in {trainer.trained_s:.0f} s on {device}", flush=True)
    trainer.check("test", 4 * trainer.config.check_per_class)


if __name__ == "__main__":
    main()
