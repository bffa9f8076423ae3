"""The training loop: a number of steps, periodic checks on dev examples, checkpoints."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import distributed

from tools.train.data import mix
from tools.train.data.base import Example
from tools.train.judge import Answer, Table, parse_answer, score
from tools.train.model import ModelConfig, Sapling, learnt_positions, rotary_tables
from tools.train.optim import make_optimisers
from tools.train.rows import Batch, Batches
from tools.train.template import render


@dataclass
class TrainConfig:
    """Settings of training.

    Everything depends on the step number, never on a clock: the same seed and number of workers
    yield the same weights, and a busy machine only takes longer.
    """

    seed: int = 1
    steps: int = 8000
    batch_tokens: int = 2048
    step_batches: int = 2
    matrix_lr: float = 0.02
    embedding_lr: float = 0.02
    norm_lr: float = 0.004
    weight_decay: float = 0.01
    warmup_steps: int = 60
    decay_from: float = 0.35
    finish_from: float = 0.82
    average: float = 0.99
    check_every: int = 800
    save_every: int = 100
    check_per_class: int = 20
    workers: int = 2
    recite_steps: int = 200
    recite_share: float = 0.75
    compiled: bool = True


def schedule(step: int, config: TrainConfig) -> float:
    """Return the learning-rate factor: short warm-up, constant, linear decay to almost zero."""
    warm = min(1.0, (step + 1) / config.warmup_steps)
    left = (1 - step / config.steps) / (1 - config.decay_from)
    return warm * max(0.01, min(1.0, left))


def related_embedding(tokenizer: Tokenizer, config: ModelConfig, seed: int) -> torch.Tensor:
    """Return initial embeddings in which ' Paris', 'Paris' and 'paris' are similar.

    Copying a word to another position then needs no knowledge of that word. Rows have a root mean
    square of one: much smaller rows would be dominated by the outputs of the layers, and the model
    would learn to copy far later (its final norm compensates by a small scale).
    """
    rng = torch.Generator().manual_seed(seed)
    space, capital = (torch.randn(config.hidden_size, generator=rng) for _ in range(2))
    bases: dict[str, torch.Tensor] = {}
    rows: list[torch.Tensor] = []
    for index in range(config.vocab_size):
        token = tokenizer.id_to_token(index) or f"unused {index}"
        word = token.removeprefix("\u0120") or token
        base = word.lower() if word.isalpha() else word
        if base not in bases:
            bases[base] = torch.randn(config.hidden_size, generator=rng)
        own = torch.randn(config.hidden_size, generator=rng)
        row = bases[base] + 0.3 * own
        if word != token:
            row = row + 0.5 * space
        if word != base:
            row = row + 0.5 * capital
        rows.append(row / row.square().mean().sqrt())
    return torch.stack(rows)


def answer_locally(
    model: Sapling, tokenizer: Tokenizer, examples: list[Example], batch: int = 64
) -> list[Answer]:
    """Return greedy answers of the model in memory, in the order of the examples."""
    model.eval()
    prompts: list[list[int]] = []
    limits: list[int] = []
    for example in examples:
        text = render(
            example.messages[:-1],
            example.tools,
            add_generation_prompt=True,
            enable_thinking=example.thinking,
        )
        prompts.append(tokenizer.encode(text).ids)
        whole = render(example.messages, example.tools)
        limits.append(len(tokenizer.encode(whole).ids) - len(prompts[-1]) + 12)
    order = sorted(range(len(examples)), key=lambda i: (limits[i] // 16, len(prompts[i])))
    answers: dict[int, Answer] = {}
    stop = tokenizer.token_to_id("<|im_end|>")
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = model.generate(
                [prompts[i] for i in chosen], stop, max(limits[i] for i in chosen)
            )
        for index, row in zip(chosen, rows, strict=True):
            stopped = not row or row[-1] != -1
            text = tokenizer.decode(row if stopped else row[:-1], skip_special_tokens=True)
            answers[index] = parse_answer(text, stopped=stopped)
    model.train()
    return [answers[index] for index in range(len(examples))]


class Trainer:
    """State of a run: model, running average, optimisers, mix weights and counters.

    Several workers may train together, each a process with one thread: they share gradients once
    per step, which costs far less on a busy machine than threads that synchronise in every
    operation.
    """

    def __init__(
        self, config: TrainConfig, tokenizer: Tokenizer, folder: Path, rank: int = 0
    ) -> None:
        torch.manual_seed(config.seed)
        torch.set_num_threads(1)
        self.config, self.tokenizer, self.folder, self.rank = config, tokenizer, folder, rank
        self.model = Sapling(ModelConfig(vocab_size=tokenizer.get_vocab_size()))
        embedding = related_embedding(tokenizer, self.model.config, config.seed)
        self.model.model.embed_tokens.weight.data.copy_(embedding)
        self.average = copy.deepcopy(self.model)
        self.optimisers = make_optimisers(
            self.model,
            config.matrix_lr,
            config.embedding_lr,
            config.norm_lr,
            config.weight_decay,
        )
        loss = self.model.loss
        self.loss = torch.compile(loss, dynamic=True) if config.compiled else loss
        self.weights = dict(mix.WEIGHTS)
        self.batches = Batches(
            tokenizer,
            self.weights,
            seed=config.seed,
            rank=rank,
            batch_tokens=config.batch_tokens,
            step_batches=config.step_batches,
        )
        self.accuracies: dict[str, float] = {}
        self.step = self.tokens = 0
        self.dev = mix.evaluation_set(config.seed, config.check_per_class, "dev")

    def say(self, text: str) -> None:
        """Log a line, once for all workers."""
        if self.rank == 0:
            print(text, flush=True)

    def save(self, name: str) -> None:
        """Write a checkpoint from which training continues exactly.

        All workers call this, because each has rows of its own in memory.
        """
        drawn: list[object] = [None] * self.config.workers
        distributed.all_gather_object(drawn, self.batches.state_dict())
        if self.rank != 0:
            return
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "weights": self.weights,
            "counters": (self.step, self.tokens),
            "accuracies": self.accuracies,
            "batches": drawn,
            "config": asdict(self.config),
        }
        torch.save(state, self.folder / "writing.pt")
        (self.folder / "writing.pt").replace(self.folder / name)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.weights.update(state["weights"])
        self.step, self.tokens = state["counters"]
        self.accuracies = state["accuracies"]
        self.batches.load_state_dict(state["batches"][self.rank])

    def check(self) -> Table:
        """Score the averaged model on dev examples, and adjust the mix."""
        mine = answer_locally(
            self.average, self.tokenizer, self.dev[self.rank :: self.config.workers]
        )
        parts: list[list[Answer]] = [[] for _ in range(self.config.workers)]
        distributed.all_gather_object(parts, mine)
        answers = [parts[index % len(parts)][index // len(parts)] for index in range(len(self.dev))]
        table = score(self.dev, answers)
        self.accuracies = {name: row["accuracy"] for name, row in table.items()}
        self.lean()
        self.say(
            "check " + " ".join(f"{name}={row['accuracy']:.2f}" for name, row in table.items())
        )
        return table

    def lean(self) -> None:
        """Shift the mix towards classes with low scores, and at the end to those learnt last."""
        finishing = self.step >= self.config.finish_from * self.config.steps
        for name, base in mix.WEIGHTS.items():
            accuracy = self.accuracies.get(mix.PART_OF.get(name, name), 1 / 3)
            factor = mix.FINISH.get(name, 1.0) if finishing else 1.0
            self.weights[name] = base * factor * (0.5 + 1.5 * (1 - accuracy))

    def share_gradients(self, counts: list[float]) -> list[float]:
        """Sum gradients and counts over the workers; gradients become means per learnt token."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        flat = torch.cat([
            *(parameter.grad.flatten() for parameter in parameters if parameter.grad is not None),
            torch.tensor(counts),
        ])  # fmt: skip
        distributed.all_reduce(flat)
        totals = flat[-len(counts) :].tolist()
        flat /= totals[0]
        start = 0
        for parameter in parameters:
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        return totals

    def train_step(self, batches: list[Batch]) -> float:
        """One optimiser step; the mean loss."""
        config = self.config
        learnt = sum(int((targets >= 0).sum()) for _, targets in batches)
        read = sum(tokens.numel() for tokens, _ in batches)
        total = 0.0
        for tokens, targets in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                tables = rotary_tables(torch.arange(tokens.shape[1]), self.model.config)
                loss = self.loss(tokens, tables, *learnt_positions(targets))
            loss.backward()
            total += float(loss.detach())
        learnt, total, read = self.share_gradients([learnt, total, read])
        if not math.isfinite(total):
            raise FloatingPointError(
                f"the loss of step {self.step} is {total}: nothing to continue from"
            )
        self.tokens += int(read)
        factor = schedule(self.step, config)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group.setdefault("full_lr", group["lr"])
                group["lr"] = group["full_lr"] * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            keep = min(self.config.average, 1 - 1 / (self.step + 2))
            mine, theirs = list(self.average.parameters()), list(self.model.parameters())
            torch._foreach_lerp_(mine, theirs, 1 - keep)
        self.step += 1
        return total / learnt

    def run(self) -> None:
        """Train until the last step is done."""
        config = self.config
        since, recent = time.monotonic(), list[float]()
        while self.step < config.steps:
            share = config.recite_share if self.step < config.recite_steps else 0.0
            recent.append(self.train_step(self.batches.next_step(share)))
            if self.step % 50 == 0:
                seconds = time.monotonic() - since
                self.say(
                    f"step {self.step} of {config.steps} loss {sum(recent) / len(recent):.4f} "
                    f"tokens {self.tokens} {1000 * seconds / len(recent):.0f} ms a step"
                )
                since, recent = time.monotonic(), list[float]()
            if self.step % config.check_every == 0:
                self.check()
            self.lean()
            if self.step % config.save_every == 0 or self.step == config.steps:
                self.save("last.pt")
