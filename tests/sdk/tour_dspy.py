"""DSPy, by its own client."""

from __future__ import annotations

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet

import dspy
from steps import KEY, MODEL, run, step

URL = sys.argv[1]
LM = dspy.LM(
    f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, cache=False, max_tokens=16, temperature=0,
    num_retries=0,
)  # fmt: skip


@step
def answers():
    [text] = LM("Hello")
    assert isinstance(text, str)
    assert LM.history[-1]["usage"]["completion_tokens"] <= 16


@step
def several_answers():
    assert len(LM(messages=[{"role": "user", "content": "Hello"}], n=2, temperature=0.7)) == 2


run("dspy")
