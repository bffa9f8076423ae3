"""Facts that the user states about themselves, to be recalled in a later turn."""

from __future__ import annotations

import random
from collections.abc import Callable

from tools.train.data.arithmetic import arithmetic
from tools.train.data.base import (
    Example,
    Message,
    assistant,
    choose,
    key_of,
    made_up,
    maybe_system,
    user,
)
from tools.train.data.facts import facts
from tools.train.data.smalltalk import smalltalk
from tools.train.data.words import ANIMALS, CITIES, COLOURS, FOODS, JOBS, NAMES

_FACTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], str, str]] = {
    "name": (
        ("My name is {x}.", "I am {x}.", "I'm {x}.", "Call me {x}.", "Hi, I'm {x}.",
         "Hello, my name is {x}.", "Hi! My name is {x}.", "You can call me {x}."),
        "Nice to meet you, {x}!",
        ("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?",
         "Tell me my name.", "What am I called?", "Do you know my name?", "Say my name."),
        "Your name is {x}.",
        "You have not told me your name yet.",
    ),
    "colour": (
        ("My favourite colour is {x}.", "My favorite color is {x}.", "I like the colour {x} best."),
        "{x} is a nice colour!",
        ("What is my favourite colour?", "What's my favorite color?", "Which colour do I like?",
         "Do you remember my favourite colour?", "What is my favorite color?"),
        "Your favourite colour is {x}.",
        "You have not told me your favourite colour yet.",
    ),
    "city": (
        ("I live in {x}.", "My city is {x}.", "My home is in {x}.", "I am from {x}.",
         "I come from {x}."),
        "{x} sounds like a nice place!",
        ("Where do I live?", "Which city do I live in?", "What is my city?", "Where am I from?",
         "Do you remember where I live?"),
        "You live in {x}.",
        "You have not told me where you live yet.",
    ),
    "food": (
        ("My favourite food is {x}.", "I love to eat {x}.", "The food I like best is {x}."),
        "{x} is a good choice!",
        ("What is my favourite food?", "What do I like to eat?", "Do you remember what I eat?",
         "What's my favorite food?"),
        "Your favourite food is {x}.",
        "You have not told me your favourite food yet.",
    ),
    "pet": (
        ("I have a {x}.", "My pet is a {x}.", "I own a {x}."),
        "A {x} is a lovely pet!",
        ("What pet do I have?", "Which animal do I have?", "What is my pet?",
         "Do you remember my pet?"),
        "You have a {x}.",
        "You have not told me about your pet yet.",
    ),
    "job": (
        ("I work as a {x}.", "My job is {x}.", "I am a {x}."),
        "Working as a {x} must be interesting!",
        ("What is my job?", "What do I work as?", "What's my job?", "Do you remember my job?"),
        "You work as a {x}.",
        "You have not told me your job yet.",
    ),
    "age": (
        ("I am {x} years old.", "My age is {x}.", "I'm {x} years old."),
        "{x} is a good age!",
        ("How old am I?", "What is my age?", "Do you remember my age?", "What's my age?"),
        "You are {x} years old.",
        "You have not told me your age yet.",
    ),
}  # fmt: skip

_OTHERS: tuple[Callable[[random.Random], Example], ...] = (arithmetic, facts, smalltalk)


def _value(rng: random.Random, what: str) -> str:
    if what == "name":
        return made_up(rng) if rng.random() < 0.25 else rng.choice(NAMES)
    if what == "city":
        return made_up(rng) if rng.random() < 0.15 else rng.choice(CITIES)
    if what == "age":
        return str(rng.randint(5, 99))
    pools = {"colour": COLOURS, "food": FOODS, "pet": ANIMALS, "job": JOBS}
    return rng.choice(pools[what])


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]


def _typed(rng: random.Random, text: str) -> str:
    roll = rng.random()
    if roll < 0.7:
        return text
    if roll < 0.85 or text.startswith(("I ", "I'")):
        return text.rstrip("?.!")
    return text[:1].lower() + text[1:].rstrip("?.!")


def memory(rng: random.Random) -> Example:
    """Draw a conversation: one to three facts, another topic, a question about one of them."""
    told = rng.sample(list(_FACTS), rng.choice((1, 1, 2, 2, 3)))
    if "name" not in told and rng.random() < 0.6:
        told[0] = "name"
    values = {what: _value(rng, what) for what in told}
    messages: list[Message] = maybe_system(rng, 0.15)
    keys: list[str] = []
    if len(told) == 2 and rng.random() < 0.35:
        text = " ".join(rng.choice(_FACTS[what][0]).format(x=values[what]) for what in told)
        reply = _FACTS[told[0]][1].format(x=values[told[0]])
        messages += [user(text), assistant(_first_up(reply))]
    else:
        for what in told:
            _, template = choose(rng, _FACTS[what][0])
            reply = _FACTS[what][1].format(x=values[what])
            text = _typed(rng, template.format(x=values[what]))
            messages += [user(text), assistant(_first_up(reply))]
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        other = rng.choice(_OTHERS)(rng)
        messages += [turn for turn in other.messages if turn["role"] != "system"]
        keys += other.keys
    asked = rng.choice(told)
    if rng.random() < 0.06:
        asked = rng.choice([what for what in _FACTS if what not in told])
    index, template = choose(rng, _FACTS[asked][2])
    answer = _FACTS[asked][3].format(x=values[asked]) if asked in values else _FACTS[asked][4]
    messages += [user(_typed(rng, template)), assistant(answer)]
    first = key_of("memory", asked, values.get(asked, ""), index, *sorted(values.values()))
    return Example("memory", messages, (first, *keys))


def memory_empty(rng: random.Random) -> Example:
    """Draw a question about a fact that was never mentioned."""
    asked = rng.choice(list(_FACTS))
    index, template = choose(rng, _FACTS[asked][2])
    lead = smalltalk(rng) if rng.random() < 0.5 else None
    messages = list(lead.messages) if lead else maybe_system(rng, 0.2)
    messages += [user(_typed(rng, template)), assistant(_FACTS[asked][4])]
    keys = lead.keys if lead else ()
    text = messages[-3]["content"] if lead else ""
    return Example("memory", messages, (key_of("empty", asked, index, text), *keys))
