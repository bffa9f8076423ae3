"""Trains an EAGLE-3 head to predict the model's next-token distributions, several drafts deep.

As at inference, later drafts read the head's own hidden states instead of the model's. At each
depth, the loss compares its distribution with the model's ("training-time test" of the EAGLE-3
paper, arXiv:2503.01840).

Shapes: B texts, T positions, R rows with a target, D hidden, F features read from the model, W
draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from sylvan.protocol.errors import ConfigError
from sylvan.training.answers import TrainingText, load
from sylvan.training.head import PastKV, TrainableHead

WARM_UP = 0.03
"""Share of the steps in which the learning rate warms up."""
DEPTH_DECAY = 0.8
"""Weight of a draft's loss relative to that of the draft before it."""
STATE = "state.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Training schedule and hyperparameters.

    Attributes:
        steps: Number of batches.
        batch_tokens: Approximate tokens per batch, including padding.
        depth: Number of consecutive drafts to train.
        learning_rate: Peak learning rate.
        save_every: Steps between checkpoints.
        seed: Seed of the order of texts.
    """

    steps: int = 2000
    batch_tokens: int = 2048
    depth: int = 4
    learning_rate: float = 1e-3
    save_every: int = 200
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Frozen weights of the model that training uses, float32.

    Attributes:
        embedding: Token embeddings (V, D), scaled as in the model.
        head: LM head (V, D).
        token_ids: IDs of the draft vocabulary, int64 (W,).
    """

    embedding: Tensor
    head: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Result of one training step.

    Attributes:
        step: Number of batches so far.
        loss: Loss of the newest batch.
        accuracy: Share of right drafts in the newest batch, by depth.
    """

    step: int
    loss: float
    accuracy: Sequence[float]


class Trainer:
    """Trains a head on the texts of some files, epoch by epoch; resumes from its checkpoint.

    Args:
        head: The head to train.
        model: Weights of the model.
        files: Files that `answers.save` wrote.
        folder: Directory of the checkpoint.
        schedule: Training schedule.
        device: Device to train on.
    """

    def __init__(
        self,
        head: TrainableHead,
        model: SharedWeights,
        files: Sequence[Path],
        folder: Path,
        schedule: Schedule,
        device: torch.device,
    ) -> None:
        self._head, self._files, self._schedule = head.to(device), files, schedule
        self._model = SharedWeights(
            model.embedding.to(device), model.head.to(device), model.token_ids.to(device)
        )
        self._device, self._state = device, folder / STATE
        self._optimizer = torch.optim.AdamW(
            head.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self._step = 0
        if self._state.exists():
            self._load()

    def run(self) -> Iterator[TrainingProgress]:
        """Train to the end; yield the result of each step."""
        for step, texts in self._batches():
            if step < self._step:
                continue  # done before an interruption
            found = self._train_step(texts)
            self._step = step + 1
            if self._step % self._schedule.save_every == 0 or self._step == self._schedule.steps:
                self._save()
            yield found

    def _train_step(self, texts: Sequence[TrainingText]) -> TrainingProgress:
        """Train on one batch."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        batch = collate(texts, self._device)
        loss, accuracy = losses(self._head, self._model, batch, self._schedule.depth)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        self._optimizer.step()
        return TrainingProgress(self._step + 1, float(loss.detach()), accuracy)

    def _learning_rate(self) -> float:
        done = self._step / self._schedule.steps
        if done < WARM_UP:
            return (
                self._schedule.learning_rate
                * (self._step + 1)
                / (WARM_UP * self._schedule.steps + 1)
            )
        return self._schedule.learning_rate * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)

    def _batches(self) -> Iterator[tuple[int, Sequence[TrainingText]]]:
        """Yield batches of texts of similar length, in an order determined by the seed."""
        step = epoch = 0
        while True:
            rng = random.Random(f"{self._schedule.seed} {epoch}")
            files = list(self._files)
            rng.shuffle(files)
            for file in files:
                texts = load(file)
                rng.shuffle(texts)
                for batch in _grouped(texts, self._schedule.batch_tokens, rng):
                    if step == self._schedule.steps:
                        return
                    yield step, batch
                    step += 1
            epoch += 1

    def _save(self) -> None:
        state = {f"head.{name}": weight for name, weight in self._head.state_dict().items()}
        for number, part in self._optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{number}.{name}": value for name, value in part.items()}
        state["step"] = torch.tensor(self._step)
        unfinished = self._state.with_suffix(".unfinished")
        save_file({name: value.contiguous() for name, value in state.items()}, unfinished)
        unfinished.replace(self._state)

    def _load(self) -> None:
        whole = self._optimizer.state_dict()
        whole["state"] = parts = dict[int, dict[str, Tensor]]()
        try:
            state = load_file(self._state, str(self._device))
            self._step = int(state.pop("step"))
            head = {n.removeprefix("head."): w for n, w in state.items() if n.startswith("head.")}
            for name in state.keys() - {f"head.{name}" for name in head}:
                _, number, part = name.split(".")
                parts.setdefault(int(number), {})[part] = state[name]
            self._head.load_state_dict(head)
            self._optimizer.load_state_dict(whole)
        except (RuntimeError, ValueError, LookupError, OSError, SafetensorError):
            raise ConfigError(
                f"{self._state} is of another training run, or damaged; remove it to start over"
            ) from None


@dataclass(frozen=True, slots=True)
class PaddedTexts:
    """A batch of texts, padded to one length.

    Attributes:
        tokens: Token IDs, int64 (B, T + 1).
        features: (B, T, F).
        final_hidden: (B, T, D).
        in_answer: Whether the next token belongs to the answer, bool (B, T).
    """

    tokens: Tensor
    features: Tensor
    final_hidden: Tensor
    in_answer: Tensor


def collate(texts: Sequence[TrainingText], device: torch.device) -> PaddedTexts:
    """Pad texts to the longest one. T is its number of positions with hidden states."""
    length = max(len(text.features) for text in texts)
    tokens = torch.zeros(len(texts), length + 1, dtype=torch.long)
    features = torch.zeros(len(texts), length, texts[0].features.shape[1])
    final_hidden = torch.zeros(len(texts), length, texts[0].final_hidden.shape[1])
    in_answer = torch.zeros(len(texts), length, dtype=torch.bool)
    for i, text in enumerate(texts):
        count = len(text.features)
        tokens[i, : count + 1] = torch.from_numpy(text.tokens)
        features[i, :count], final_hidden[i, :count] = text.features, text.final_hidden
        in_answer[i, text.prompt_len - 1 : count] = True
    return PaddedTexts(*(part.to(device) for part in (tokens, features, final_hidden, in_answer)))


def losses(
    head: TrainableHead, model: SharedWeights, texts: PaddedTexts, depth: int
) -> tuple[Tensor, list[float]]:
    """Return the loss of a batch, and the share of right drafts by depth."""
    past = PastKV([], [])
    hidden_BTD = head.fc(texts.features)
    total = hidden_BTD.new_zeros(())
    weight, accuracy = 1.0, list[float]()
    for number in range(depth):
        # row i drafts the token at i + number + 2, which the model predicts at i + number + 1
        tokens_BT = _shifted(texts.tokens[:, 1:], number)
        embeds_BTD = F.embedding(tokens_BT, model.embedding)
        hidden_BTD = head(embeds_BTD, hidden_BTD, past)
        mask = _shifted(texts.in_answer, number + 1)
        if not mask.any():
            break
        teacher_RV = _shifted(texts.final_hidden, number + 1)[mask] @ model.head.T
        teacher_RW = teacher_RV[:, model.token_ids]
        logits_RW = head.logits(hidden_BTD[mask])
        best_R = teacher_RV.argmax(-1)
        predicted_R = model.token_ids[logits_RW.argmax(-1)]
        accuracy.append(float((predicted_R == best_R).float().mean()))
        each_R = -(teacher_RW.softmax(-1) * logits_RW.log_softmax(-1)).sum(-1)
        draftable_R = (model.token_ids[teacher_RW.argmax(-1)] == best_R).float()
        total = total + weight * (each_R * draftable_R).sum() / draftable_R.sum().clamp(min=1)
        weight *= DEPTH_DECAY
    return total, accuracy


def _shifted(x: Tensor, count: int) -> Tensor:
    """Shift left by `count` positions and fill with zeros. Shape: that of x, (B, T, ...)."""
    if not count:
        return x
    return torch.cat([x[:, count:], torch.zeros_like(x[:, :count])], 1)


def _grouped(
    texts: Sequence[TrainingText], tokens: int, rng: random.Random
) -> list[Sequence[TrainingText]]:
    """Group texts into batches of at most `tokens` tokens, including padding."""
    batches: list[list[TrainingText]] = []
    longest = 0
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        longest = max(longest, len(text.tokens))
        if not batches or longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = len(text.tokens)
        batches[-1].append(text)
    rng.shuffle(batches)
    return list(batches)
