"""GRPO on the built-in model: rollouts by `sylvan.Engine`, a trainer in PyTorch, one machine.

The task is a toy: continue a list of numbers in even digits only. In each step the engine draws a
group of answers to each prompt, the trainer moves the weights towards the better ones of each
group, and the engine gets the new weights through shared memory. The trainer needs transformers.

    python examples/rl/grpo.py [--steps 20]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from transformers import LlamaForCausalLM

from sylvan import Engine

MODEL = str(files("sylvan") / "assets" / "sapling")
PROMPTS = ("Numbers: 1", "Numbers: 3", "Numbers: 5", "Numbers: 7")
LIMIT = 16  # tokens of an answer
GROUP = 16  # answers to each prompt
CLIP = 0.2
RATE = 1e-4


@dataclass(frozen=True)
class Rollout:
    """An answer, with the log probability that the engine gave each of its tokens."""

    prompt: list[int]
    text: str
    answer: list[int]
    logprobs: list[float]
    version: str

    @property
    def reward(self) -> float:
        """How much of the text are even digits."""
        return sum(c in "02468" for c in self.text) / max(1, len(self.text))


@dataclass(frozen=True)
class Report:
    """Result of a step."""

    reward: float
    version: str
    exact: bool
    drift: float


def draw(engine: Engine, prompts: list[list[int]], step: int) -> list[list[Rollout]]:
    """A group of answers to each prompt."""
    groups: list[list[Rollout]] = []
    sampling = {"temperature": 1.0, "max_new_tokens": LIMIT, "n": GROUP, "sampling_seed": step}
    replies: Any = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    for i, prompt in enumerate(prompts):
        group: list[Rollout] = []
        for reply in replies[i * GROUP : (i + 1) * GROUP]:
            meta = reply["meta_info"]
            logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
            version = meta["weight_version"]
            rollout = Rollout(prompt, reply["text"], reply["output_ids"], logprobs, version)
            group.append(rollout)
        groups.append(group)
    return groups


def recomputed(engine: Engine, rollout: Rollout) -> list[float]:
    """The same log probabilities, computed by the engine as those of a prompt."""
    reply: Any = engine.generate(
        input_ids=[*rollout.prompt, *rollout.answer],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )
    entries = reply["meta_info"]["input_token_logprobs"]
    return [entry[0] for entry in entries[len(rollout.prompt) :]]


def logprobs_of(model: LlamaForCausalLM, rollout: Rollout) -> torch.Tensor:
    """Log probabilities of an answer's tokens by the trainer's weights: (answer,)."""
    ids = torch.tensor([[*rollout.prompt, *rollout.answer]])
    logits = model(ids).logits[0, len(rollout.prompt) - 1 : -1].float()
    chosen = torch.tensor(rollout.answer)[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0]


def train(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, groups: list[list[Rollout]]
) -> float:
    """One step of GRPO; returns how far its log probabilities were from the engine's at most."""
    drift = 0.0
    optimizer.zero_grad()
    for group in groups:
        rewards = torch.tensor([rollout.reward for rollout in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for rollout, advantage in zip(group, advantages, strict=True):
            now, then = logprobs_of(model, rollout), torch.tensor(rollout.logprobs)
            drift = max(drift, float((now.detach() - then).abs().max()))
            ratio = (now - then).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            (loss / (len(groups) * len(group))).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return drift


def run(steps: int) -> list[Report]:
    """Train; returns what each step brought."""
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    reports: list[Report] = []
    with Engine(model=MODEL, dtype="float32", device="cpu", log_level="warning") as engine:
        prompts = [engine.tokenizer.encode(text) for text in PROMPTS]
        for step in range(steps):
            groups = draw(engine, prompts, step)
            rollouts = [rollout for group in groups for rollout in group]
            exact = recomputed(engine, rollouts[0]) == rollouts[0].logprobs
            drift = train(model, optimizer, groups)
            done, why = engine.update_weights_from_tensor(
                model.state_dict(), weight_version=f"step-{step + 1}"
            )
            assert done, why
            reward = sum(rollout.reward for rollout in rollouts) / len(rollouts)
            reports.append(Report(reward, rollouts[0].version, exact, drift))
            print(
                f"{rollouts[0].version:9} reward {reward:.3f}  recomputed to the bit: {exact}  "
                f"farthest from the trainer: {drift:.1e}",
                flush=True,
            )
    return reports


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    run(parser.parse_args().steps)
