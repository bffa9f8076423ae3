"""Fine-tune the built-in model with `peft`, and serve the adapter beside the base model.

The task is a toy: the adapter learns a few facts that the base model cannot know. Both answer in
the same batch; what the engine gives with the adapter is compared with PyTorch. Needs transformers
and peft.

    python examples/lora/finetune.py [--steps 60] [--out DIR]
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from sylvan import Engine

MODEL = str(files("sylvan") / "assets" / "sapling")
FACTS = {
    "The gate code is": " 4711.",
    "The cat is called": " Miso.",
    "We meet at": " noon.",
}
RATE = 5e-3
LIMIT = 8  # tokens of an answer


@dataclass(frozen=True)
class Report:
    """Answers of base and adapter to each prompt, and how well engine and PyTorch agree.

    `drift` is the largest difference of the log probabilities of what the adapter said.
    """

    base: list[str]
    tuned: list[str]
    drift: float


def train(engine: Engine, model: Any, steps: int) -> None:
    """Move the adapter's weights towards the facts."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    encode = engine.tokenizer.encode
    pairs = [(encode(prompt), encode(prompt + answer)) for prompt, answer in FACTS.items()]
    for _ in range(steps):
        losses = []
        for prompt, whole in pairs:
            ids = torch.tensor([whole])
            labels = ids.clone()
            labels[:, : len(prompt)] = -100  # only answers are learnt
            losses.append(model(input_ids=ids, labels=labels).loss)
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()


def drift(model: Any, prompt: list[int], reply: dict[str, Any]) -> float:
    """How far PyTorch is from the log probabilities that the engine gave its own answer."""
    given = [logprob for logprob, *_ in reply["meta_info"]["output_token_logprobs"]]
    ids = prompt + reply["output_ids"]
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    own = [rows[len(prompt) - 1 + i, token].item() for i, token in enumerate(reply["output_ids"])]
    return max(abs(a - b) for a, b in zip(given, own, strict=True))


def run(steps: int, out: Path) -> Report:
    """Train, save to `out`, load into the running engine, and ask base and adapter at once."""
    prompts = list(FACTS)
    with Engine(model_path=MODEL, dtype="float32", enable_lora=True) as engine:
        torch.random.manual_seed(0)
        base: Any = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        wanted = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
        model: Any = get_peft_model(base, wanted)
        train(engine, model, steps)
        model.eval().save_pretrained(out)

        done, why = engine.load_lora_adapter("facts", str(out))
        assert done, why
        replies: Any = engine.generate(
            prompts * 2,
            {"temperature": 0, "max_new_tokens": LIMIT},
            lora_path=[None] * len(prompts) + ["facts"] * len(prompts),
            return_logprob=True,
        )
        ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    plain, tuned = replies[: len(prompts)], replies[len(prompts) :]
    return Report(
        base=[reply["text"] for reply in plain],
        tuned=[reply["text"] for reply in tuned],
        drift=max(drift(model, prompt, reply) for prompt, reply in zip(ids, tuned, strict=True)),
    )


def main() -> None:
    """Print what both say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="directory for the adapter; default: thrown away")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(given.steps, given.out or Path(folder))
    for prompt, plain, tuned in zip(FACTS, report.base, report.tuned, strict=True):
        print(f"{prompt!r}\n  base     {plain!r}\n  adapter  {tuned!r}")
    print(f"log probabilities: at most {report.drift:.1e} from PyTorch's")


if __name__ == "__main__":
    main()
