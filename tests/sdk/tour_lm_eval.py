"""The evaluation harness `lm_eval`: its log likelihoods are those of transformers in float32."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from steps import KEY, MODEL, run, step

URL = sys.argv[1]
os.environ["OPENAI_API_KEY"] = KEY
WEIGHTS = Path(__file__).parents[2] / "src" / "sylvan" / "assets" / "sapling"
PAIRS = [
    ("The capital of France is", " Paris"),
    ("What is 17 + 25?", " 42"),
    ("Hello", ", how are you today? I am well."),
]


def of_transformers(context: str, continuation: str) -> tuple[float, bool]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(WEIGHTS)
    model = transformers.AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    whole = tokenizer(context + continuation)["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        found = torch.log_softmax(model(torch.tensor([whole])).logits[0].double(), -1)
    rows = found[start - 1 : len(whole) - 1]
    ids = torch.tensor(whole[start:])
    greedy = bool((rows.argmax(-1) == ids).all())
    return float(rows.gather(1, ids[:, None]).sum()), greedy


@step
def log_likelihoods():
    harness = LocalCompletionsAPI(
        model=MODEL, base_url=f"{URL}/v1/completions", tokenizer=str(WEIGHTS), max_length=2048
    )
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    for found, pair in zip(harness.loglikelihood(requests), PAIRS, strict=True):
        logprob, greedy = of_transformers(*pair)
        assert abs(found[0] - logprob) < 1e-4, (pair, found, logprob)
        assert found[1] == greedy


run("lm_eval")
