"""Budgets of thinking on a real server, token by token."""

from __future__ import annotations

import httpx
import pytest

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
THINK = {"messages": QUESTION, "chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def http(sapling):
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=sapling.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def marks(http):
    """Ids of the markers around thinking, each of which is one token of this model."""
    ids = []
    for text in ("<think>", "</think>"):
        body = {"prompt": text, "add_special_tokens": False}
        ids += http.post("/tokenize", json=body).json()["tokens"]
    assert len(ids) == 2
    return ids


@pytest.fixture(scope="module")
def prompt(http, marks):
    """Ids of a prompt that ends in thinking."""
    return [*http.post("/v1/chat/render", json=THINK).json()["input_ids"], marks[0]]


def ask(http, marks, prompt, **fields):
    """An answer of a model that would never stop thinking."""
    bias = {str(marks[1]): -100}
    body = {**THINK, "input_ids": prompt, "max_tokens": 12, "logit_bias": bias, **fields}
    body = {"temperature": 0, "return_token_ids": True, "ignore_eos": True, **body}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    reply = response.json()
    return reply["choices"][0], reply["usage"]


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize(
    "fields",
    [
        lambda n: {"thinking_budget": n},
        lambda n: {"max_thinking_tokens": n, "logprobs": True},
        lambda n: {"thinking": {"type": "enabled", "budget_tokens": n}, "temperature": 1, "n": 2},
    ],
    ids=["plain", "logprobs", "sampled"],
)
def test_thinking_ends_when_its_budget_is_spent(http, marks, prompt, budget, fields):
    choice, _ = ask(http, marks, prompt, **fields(budget))

    ids = choice["response_token_ids"]
    assert ids.index(marks[1]) == budget
    assert len(ids) == 12


def test_budget_counts_from_the_start_that_the_model_writes(http, marks, prompt):
    begin = {"logit_bias": {str(marks[0]): 100}, "max_tokens": 1}
    choice, _ = ask(http, marks, prompt[:-1], **begin)
    assert choice["response_token_ids"] == marks[:1]

    body = {"thinking_budget": 2, "logit_bias": {str(marks[0]): 100}}
    choice, _ = ask(http, marks, prompt[:-1], **body)

    assert choice["response_token_ids"][:4] == [marks[0], marks[0], marks[0], marks[1]]


def test_without_a_budget_thinking_continues(http, marks, prompt):
    choice, usage = ask(http, marks, prompt)

    assert marks[1] not in choice["response_token_ids"]
    assert usage["reasoning_tokens"] == 12


def test_reasoning_tokens_count_what_was_thought(http, marks, prompt):
    _, usage = ask(http, marks, prompt, thinking_budget=5, logit_bias={str(marks[1]): -100})

    assert usage["reasoning_tokens"] == 6  # with the marker


def test_grammar_begins_after_a_spent_budget(http, marks, prompt):
    fields = {"thinking_budget": 3, "regex": "(yes|no)", "max_tokens": 40, "ignore_eos": False}
    choice, _ = ask(http, marks, prompt, **fields)

    assert choice["response_token_ids"][3] == marks[1]
    assert choice["message"]["content"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"


def test_native_route_takes_a_budget(http, marks, prompt):
    params = {"max_new_tokens": 8, "temperature": 0, "logit_bias": {str(marks[1]): -100}}
    text = http.post("/v1/chat/render", json=THINK).json()["text"]
    for given in (
        {"text": f"{text}<think>"},
        {"input_ids": prompt},
        {"input_ids": prompt[:-1], "require_reasoning": True},
    ):
        body = {**given, "sampling_params": params, "max_thinking_tokens": 2}
        assert http.post("/generate", json=body).json()["output_ids"].index(marks[1]) == 2


def test_anthropic_budget_is_a_bound(http):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": "m", "max_tokens": 20, "messages": QUESTION, "temperature": 0}
    reply = http.post("/v1/messages", json={**body, "thinking": thinking})

    assert reply.status_code == 200
    small = {**thinking, "budget_tokens": 1023}
    assert http.post("/v1/messages", json={**body, "thinking": small}).status_code == 400
