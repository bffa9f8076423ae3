"""Trains an EAGLE-3 head: it learns what the model would have said, several guesses deep.

As at inference, the head continues from its own vectors where the model's are unknown, and learns
at each depth what the model predicts there (`training-time test` of the EAGLE-3 paper).

Shapes: B texts, T positions, D hidden, F columns that are read of the model, W tokens that the head
can guess, V vocabulary.
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
from sylvan.training.answers import Text, load
from sylvan.training.head import PastKV, TrainableHead

WARM_UP = 0.03
"""Share of steps in which the learning rate grows."""
DEEPER = 0.8
"""A guess weighs so much of the one before it."""
STATE = "state.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How a head is trained.

    Attributes:
        steps: Batches.
        batch_tokens: Of a batch, about.
        depth: Guesses in a row that are learnt.
        rate: Largest learning rate.
        save_every: Steps.
        seed: Of the order of texts.
    """

    steps: int = 2000
    batch_tokens: int = 2048
    depth: int = 4
    rate: float = 1e-3
    save_every: int = 200
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Weights that the head shares with the model, float32.

    Attributes:
        embedding: (V, D), scaled as the model does.
        head: (V, D) of its vocabulary.
        token_ids: int64 (W,), those that the draft head can guess.
    """

    embedding: Tensor
    head: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """How far training has come.

    Attributes:
        step: Batches so far.
        loss: Of the newest ones.
        right: Share of guesses that are right, by depth, of the newest ones.
    """

    step: int
    loss: float
    right: Sequence[float]


class Trainer:
    """Goes through the texts of some files again and again.

    Args:
        head: To be trained.
        model: What it shares with the model.
        files: Of texts.
        folder: For the state, so that training can continue where it stopped.
        schedule: How.
        device: To train on.
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
            head.parameters(), lr=schedule.rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self._step = 0
        if self._state.exists():
            self._load()

    def run(self) -> Iterator[TrainingProgress]:
        """Train to the end; yields every step."""
        for step, texts in self._batches():
            if step < self._step:
                continue  # before it was interrupted
            found = self._learn(texts)
            self._step = step + 1
            if self._step % self._schedule.save_every == 0 or self._step == self._schedule.steps:
                self._save()
            yield found

    def _learn(self, texts: Sequence[Text]) -> TrainingProgress:
        """One batch."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        batch = collate(texts, self._device)
        loss, right = losses(self._head, self._model, batch, self._schedule.depth)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        self._optimizer.step()
        return TrainingProgress(self._step + 1, float(loss.detach()), right)

    def _rate(self) -> float:
        done = self._step / self._schedule.steps
        if done < WARM_UP:
            return self._schedule.rate * (self._step + 1) / (WARM_UP * self._schedule.steps + 1)
        return self._schedule.rate * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)

    def _batches(self) -> Iterator[tuple[int, Sequence[Text]]]:
        """Texts of about one length together, in an order that follows from the seed."""
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
                f"{self._state} is of another training, or damaged; remove it to start over"
            ) from None


@dataclass(frozen=True, slots=True)
class Texts:
    """Some texts, padded.

    Attributes:
        tokens: int64 (B, T).
        columns: (B, T, F).
        last: (B, T, D).
        answered: bool (B, T): positions whose next token the model has said.
    """

    tokens: Tensor
    columns: Tensor
    last: Tensor
    answered: Tensor


def collate(texts: Sequence[Text], device: torch.device) -> Texts:
    """Pad texts to the longest. T is the number of positions that the model has computed."""
    length = max(len(text.columns) for text in texts)
    tokens = torch.zeros(len(texts), length + 1, dtype=torch.long)
    columns = torch.zeros(len(texts), length, texts[0].columns.shape[1])
    last = torch.zeros(len(texts), length, texts[0].last.shape[1])
    answered = torch.zeros(len(texts), length, dtype=torch.bool)
    for i, text in enumerate(texts):
        count = len(text.columns)
        tokens[i, : count + 1] = torch.from_numpy(text.tokens)
        columns[i, :count], last[i, :count] = text.columns, text.last
        answered[i, text.prompt_len - 1 : count] = True
    return Texts(*(part.to(device) for part in (tokens, columns, last, answered)))


def losses(
    head: TrainableHead, model: SharedWeights, texts: Texts, depth: int
) -> tuple[Tensor, list[float]]:
    """The loss of a batch, and the share of right guesses by depth."""
    past = PastKV([], [])
    hidden_BTD = head.fc(texts.columns)
    total = hidden_BTD.new_zeros(())
    weight, right = 1.0, list[float]()
    for number in range(depth):
        # row i guesses the token at i + number + 2, which the model said at i + number + 1
        tokens_BT = _shifted(texts.tokens[:, 1:], number)
        embeds_BTD = F.embedding(tokens_BT, model.embedding)
        hidden_BTD = head(embeds_BTD, hidden_BTD, past)
        wanted = _shifted(texts.answered, number + 1)
        if not wanted.any():
            break
        said_RV = _shifted(texts.last, number + 1)[wanted] @ model.head.T
        said_RW = said_RV[:, model.token_ids]
        logits_RW = head.logits(hidden_BTD[wanted])
        best_R = said_RV.argmax(-1)
        guessed_R = model.token_ids[logits_RW.argmax(-1)]
        right.append(float((guessed_R == best_R).float().mean()))
        each_R = -(said_RW.softmax(-1) * logits_RW.log_softmax(-1)).sum(-1)
        taught_R = (model.token_ids[said_RW.argmax(-1)] == best_R).float()  # it can be guessed
        total = total + weight * (each_R * taught_R).sum() / taught_R.sum().clamp(min=1)
        weight *= DEEPER
    return total, right


def _shifted(x: Tensor, count: int) -> Tensor:
    """Shift by `count` positions; zeros at the end. Shape: that of x, (B, T, ...)."""
    if not count:
        return x
    return torch.cat([x[:, count:], torch.zeros_like(x[:, :count])], 1)


def _grouped(texts: Sequence[Text], tokens: int, rng: random.Random) -> list[Sequence[Text]]:
    """Batches of about so many tokens, padding included."""
    batches: list[list[Text]] = []
    longest = 0
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        longest = max(longest, len(text.tokens))
        if not batches or longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = len(text.tokens)
        batches[-1].append(text)
    rng.shuffle(batches)
    return list(batches)
