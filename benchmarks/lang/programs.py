"""The programs of the paper (SGLang, arXiv:2312.07104 s6), each also as plain OpenAI calls.

Lengths are fixed (`ignore_eos`), so that a model with random weights does the same work as a
trained one. Both forms of a workload send the same prompts and request the same number of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import sylvan as sgl

Ask = Callable[[str, int], str]  # (prompt, tokens) -> text, by one call
WORDS = [
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life"),
    *("child", "world", "school", "state", "family", "student", "group", "country", "problem"),
    *("hand", "part", "place", "case", "week", "company", "system", "program", "question"),
    *("work", "government", "number", "night", "point", "home", "water", "room", "mother"),
    *("area", "money", "story", "fact", "month", "lot", "right", "study", "book"),
]


@dataclass(frozen=True)
class Workload:
    """One program. `plain` runs an item with calls only; `shares` if runs have a prefix."""

    name: str
    program: Any
    items: list[dict[str, Any]]
    plain: Callable[[Ask, dict[str, Any]], Any]
    shares: bool = True


def text(seed: Any, words: int) -> str:
    drawn = random.Random(str(seed))
    return " ".join(drawn.choice(WORDS) for _ in range(words))


def gen(name: str, tokens: int):
    return sgl.gen(name, max_tokens=tokens, ignore_eos=True)


def every(ask: Ask, prompts: list[str], tokens: int) -> list[str]:
    """Make calls concurrently, as a careful user of the API does."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(prompt, tokens), prompts))


# Few-shot: one long set of examples for all questions (MMLU, HellaSwag).

SHOTS = "\n\n".join(f"Q: {text(('q', i), 40)}\nA: {text(('a', i), 5)}" for i in range(20)) + "\n\n"


@sgl.function
def few_shot(s, question):
    s += SHOTS + "Q: " + question + "\nA:"
    s += gen("answer", 4)


def few_shot_plain(ask, item):
    return ask(SHOTS + "Q: " + item["question"] + "\nA:", 4)


# ReAct: a loop of thoughts, actions and observations on a growing text.

REACT = f"Solve with tools.\n{text('react', 300)}\n"


@sgl.function
def react(s, question):
    s += REACT + "Question: " + question + "\n"
    for i in range(4):
        s += f"Thought {i}:" + gen("thought", 24)
        s += f"\nAction {i}:" + gen("action", 8)
        s["action"]
        s += f"\nObservation {i}: " + text((question, i), 30) + "\n"


def react_plain(ask, item):
    so_far = REACT + "Question: " + item["question"] + "\n"
    for i in range(4):
        so_far += f"Thought {i}:"
        so_far += ask(so_far, 24)
        so_far += f"\nAction {i}:"
        so_far += ask(so_far, 8)
        so_far += f"\nObservation {i}: " + text((item["question"], i), 30) + "\n"
    return so_far


# Tree of thought: plans, solutions of each plan, and a score of each solution.

TREE = f"Solve the problem step by step.\n{text('tree', 400)}\n"


@sgl.function
def tree_of_thought(s, question):
    s += TREE + "Problem: " + question + "\n"
    plans = s.fork(3)
    plans += lambda i: f"Plan {i}:"
    plans += gen("plan", 24)
    for plan in plans:
        solutions = plan.fork(2)
        solutions += lambda i: f"\nSolution {i}:"
        solutions += gen("solution", 32)
        solutions += "\nScore:" + gen("score", 2)
        solutions.join()
    plans.join()


def tree_of_thought_plain(ask, item):
    base = TREE + "Problem: " + item["question"] + "\n"
    heads = [base + f"Plan {i}:" for i in range(3)]
    plans = [a + b for a, b in zip(heads, every(ask, heads, 24), strict=True)]
    heads = [plan + f"\nSolution {i}:" for plan in plans for i in range(2)]
    solved = [a + b for a, b in zip(heads, every(ask, heads, 32), strict=True)]
    return every(ask, [solution + "\nScore:" for solution in solved], 2)


# Skeleton of thought: points first, then every point is expanded in parallel.


@sgl.function
def skeleton_of_thought(s, question):
    s += "Give a skeleton of five points.\n" + question + "\n" + gen("skeleton", 40)
    points = s.fork(5)
    points += lambda i: f"\nExpand point {i}:"
    points += gen("point", 40)
    points.join()


def skeleton_of_thought_plain(ask, item):
    head = "Give a skeleton of five points.\n" + item["question"] + "\n"
    head += ask(head, 40)
    return every(ask, [head + f"\nExpand point {i}:" for i in range(5)], 40)


# LLM judge: an essay judged in several dimensions, then summarised.


@sgl.function
def llm_judge(s, essay):
    s += "Judge this essay.\n" + essay + "\n"
    judges = s.fork(5)
    judges += lambda i: f"Dimension {i}:"
    judges += gen("judgment", 24)
    judges.join()
    s += "Judgments: " + " ".join(s["judgment"]) + "\nGrade:" + gen("grade", 2)


def llm_judge_plain(ask, item):
    head = "Judge this essay.\n" + item["essay"] + "\n"
    judgments = every(ask, [head + f"Dimension {i}:" for i in range(5)], 24)
    return ask(head + "Judgments: " + " ".join(judgments) + "\nGrade:", 2)


# JSON: a record filled field by field.

FIELDS = ("name", "age", "house", "wand", "friend")
JSON = f"Write the record of each character as JSON.\n{text('json', 250)}\n"


@sgl.function
def json_decode(s, character):
    s += JSON + character + "\n{\n"
    for field in FIELDS:
        s += f'  "{field}": "' + gen(field, 6) + '",\n'
    s += "}"


def json_decode_plain(ask, item):
    so_far = JSON + item["character"] + "\n{\n"
    for field in FIELDS:
        so_far += f'  "{field}": "'
        so_far += ask(so_far, 6) + '",\n'
    return so_far


# Multi-turn chat, with short and long answers.


@sgl.function
def chat(s, questions, tokens):
    for question in questions:
        s += "User: " + question + "\nAssistant:" + gen("answer", tokens) + "\n"


def chat_plain(ask, item):
    so_far = ""
    for question in item["questions"]:
        so_far += "User: " + question + "\nAssistant:"
        so_far += ask(so_far, item["tokens"]) + "\n"
    return so_far


# Retrieval: questions about the same few documents.


@sgl.function
def rag(s, context, question):
    s += "Context:\n" + context + "\nQuestion: " + question + "\nAnswer:" + gen("answer", 16)


def rag_plain(ask, item):
    return ask("Context:\n" + item["context"] + "\nQuestion: " + item["question"] + "\nAnswer:", 16)


# Nothing shared: the control, where the cache must cost nothing.


@sgl.function
def unshared(s, prompt):
    s += prompt + gen("answer", 16)


def unshared_plain(ask, item):
    return ask(item["prompt"], 16)


def chats(n, tokens):
    return [
        {"questions": [text((tokens, i, turn), 30) for turn in range(4)], "tokens": tokens}
        for i in range(n)
    ]


def workloads(n: int, run: int) -> list[Workload]:
    """Return all workloads of `n` programs each; another `run` has other items, so nothing is
    cached.
    """

    def items(name, key, words):
        return [{key: text((name, run, i), words)} for i in range(n)]

    documents = [text(("doc", run, i), 300) for i in range(max(1, n // 8))]
    asked = [
        {"context": documents[i % len(documents)], "question": text(("rag", run, i), 12)}
        for i in range(n)
    ]
    turns = {t: [dict(c, questions=[f"{run} " + q for q in c["questions"]]) for c in chats(n, t)]
             for t in (8, 64)}  # fmt: skip
    return [
        Workload("few-shot", few_shot, items("few", "question", 30), few_shot_plain),
        Workload("ReAct", react, items("react", "question", 20), react_plain),
        Workload("tree of thought", tree_of_thought, items("tot", "question", 30),
                 tree_of_thought_plain),
        Workload("skeleton of thought", skeleton_of_thought, items("sot", "question", 60),
                 skeleton_of_thought_plain),
        Workload("LLM judge", llm_judge, items("judge", "essay", 250), llm_judge_plain),
        Workload("JSON", json_decode, items("json", "character", 8), json_decode_plain),
        Workload("multi-turn, short", chat, turns[8], chat_plain),
        Workload("multi-turn, long", chat, turns[64], chat_plain),
        Workload("RAG", rag, asked, rag_plain),
        Workload("nothing shared", unshared, items("none", "prompt", 200), unshared_plain,
                 shares=False),
    ]  # fmt: skip
