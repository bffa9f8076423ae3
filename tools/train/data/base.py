"""Examples, their split into train, dev and test, and helpers that phrase requests."""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.train.data.words import split_words

Message = dict[str, Any]

TEST_PERCENT = 8
DEV_PERCENT = 4

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are sapling, a small model.",
    "You are a helpful assistant. Answer briefly.",
    "Be brief.",
    "You are a friendly assistant.",
    "Answer the user.",
    "You are Sylvan's built-in model.",
)


@dataclass
class Example:
    """One conversation; its last message is the assistant's answer that evaluation checks.

    `keys` name the combinations that the example shows; the first one is under test. An example
    belongs to a held-out split by its first key, and to training only if none of its keys is held
    out. A `drill` has (text, whether to learn it) pieces instead of messages. `image` draws the
    image for the first `<image>` in the messages, a `PIL.Image.Image`.
    """

    kind: str
    messages: list[Message]
    keys: tuple[str, ...]
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    drill: list[tuple[str, bool]] = field(default_factory=list)
    image: Callable[[], Any] | None = None


def bucket(key: str) -> str:
    """Return the split of a combination: 'test', 'dev' or 'train', by its hash."""
    percent = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) % 100
    if percent < TEST_PERCENT:
        return "test"
    return "dev" if percent < TEST_PERCENT + DEV_PERCENT else "train"


def belongs(example: Example, split: str) -> bool:
    """Whether an example may be used in a split."""
    if split == "train":
        return all(bucket(key) == "train" for key in example.keys)
    return bucket(example.keys[0]) == split


def key_of(*parts: object) -> str:
    """Return the name of a combination."""
    return "|".join(str(part) for part in parts)


def user(text: str) -> Message:
    """Return a user turn."""
    return {"role": "user", "content": text}


def assistant(text: str, thought: str | None = None) -> Message:
    """Return an assistant turn, with its reasoning if it has one."""
    message: Message = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    return message


def system(text: str) -> Message:
    """Return a system turn."""
    return {"role": "system", "content": text}


def maybe_system(rng: random.Random, chance: float = 0.2) -> list[Message]:
    """Sometimes return a system prompt that has no effect."""
    return [system(rng.choice(SYSTEM_PROMPTS))] if rng.random() < chance else []


def choose(rng: random.Random, templates: Sequence[str]) -> tuple[int, str]:
    """Draw a template; also return its index, which is part of the combination's key."""
    index = rng.randrange(len(templates))
    return index, templates[index]


def casual(rng: random.Random, text: str) -> str:
    """Sometimes return the text as people type it: no capital, no full stop, or a polite frame."""
    roll = rng.random()
    bare = text.rstrip("?.!")
    if roll < 0.55:
        return text
    if roll < 0.70:
        return bare
    if roll < 0.88:
        kept = bare if roll < 0.82 else text
        return kept[:1].lower() + kept[1:]
    if roll < 0.96:
        lead = "Please " if roll < 0.92 else rng.choice(("Hi, ", "Hey, ", "Hello! ", "Ok, "))
        return lead + text[:1].lower() + text[1:]
    return bare + rng.choice((" please", ", please.", " Thanks!", " please?"))


def join_and(items: Sequence[str]) -> str:
    """'a', 'a and b' or 'a, b and c'."""
    if len(items) < 2:
        return "".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]


_ONSETS = split_words(
    "b c d f g h j k l m n p r s t v w z br ch cl dr fr gr kr pl sh st th tr x y qu"
)
_VOWELS = split_words("a e i o u a e i o ai ee ia oo ou ei y")
_CODAS = ("", "", "", "", *split_words("n r s l m t d k x th nd rt ck ll ng"))


def made_up(rng: random.Random, *, capital: bool = True) -> str:
    """Return a random word, so that copying is learnt for unseen strings."""
    parts = [
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((1, 2, 2, 2, 3)))
    ]
    word = "".join(parts)
    return word.capitalize() if capital else word


def scrambled(rng: random.Random, low: int = 3, high: int = 8) -> str:
    """Return a random identifier of letters and digits."""
    alphabet = rng.choice(
        (
            string.ascii_lowercase,
            string.ascii_uppercase,
            string.digits,
            string.ascii_lowercase + string.digits,
        )
    )
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(low, high)))
