"""Copying, reversing and sorting short lists, repeating a word, and counting."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tools.train.data.base import (
    Example,
    assistant,
    casual,
    choose,
    key_of,
    made_up,
    maybe_system,
    scrambled,
    user,
)
from tools.train.data.words import ADJECTIVES, CITIES, COLOURS, NAMES, NOUNS, VERBS

_REVERSE = (
    "Reverse this list: {x}", "Reverse the list {x}", "Reverse: {x}", "Write {x} in reverse order.",
    "List these backwards: {x}", "Give me this list in reverse: {x}", "Reverse the order of {x}",
    "Reverse the words: {x}", "Turn this list around: {x}", "Put these in reverse order: {x}",
)  # fmt: skip
_SORT_WORDS = (
    "Sort these words: {x}", "Sort these words alphabetically: {x}", "Sort alphabetically: {x}",
    "Put these words in alphabetical order: {x}", "Sort this list: {x}", "Sort: {x}",
    "Order these words from A to Z: {x}", "Arrange alphabetically: {x}", "Sort the words {x}",
)  # fmt: skip
_SORT_UP = (
    "Sort these numbers: {x}", "Sort this list: {x}", "Sort: {x}", "Sort the numbers {x}",
    "Sort these numbers from smallest to largest: {x}", "Sort in ascending order: {x}",
    "Put these numbers in order: {x}", "Order these numbers: {x}",
)  # fmt: skip
_SORT_DOWN = (
    "Sort these numbers from largest to smallest: {x}", "Sort in descending order: {x}",
    "Sort the numbers {x} from high to low", "Order these numbers from largest to smallest: {x}",
)  # fmt: skip
_COPY = (
    "Repeat: {x}", "Repeat after me: {x}", "Copy this: {x}", "Say: {x}", "Copy: {x}",
    "Write exactly: {x}", "Repeat this exactly: {x}", "Echo: {x}", "Please repeat: {x}",
    "Say exactly this: {x}", "Copy this text: {x}", "Repeat this list: {x}", "Copy the list: {x}",
)  # fmt: skip
_SAY = ("Say {x}.", "Say {x}", "Say the word {x}.", "Write the word {x}.", "Say \"{x}\".",
        "Just say {x}.", "Reply with {x}.", "Answer with the word {x}.",
        "Reply with the word {x}.")  # fmt: skip
_TIMES = ("Repeat the word {x} {n} times.", "Say {x} {n} times.", "Write {x} {n} times.",
          "Repeat {x} {n} times.")  # fmt: skip
_COUNT = ("Count from {a} to {b}.", "Count {a} to {b}.", "List the numbers from {a} to {b}.",
          "Write the numbers from {a} to {b}.", "Please count from {a} to {b}.",
          "Can you count from {a} to {b}?")  # fmt: skip
_COUNT_TO = ("Count to {b}.", "Count up to {b}.", "Can you count to {b}?")
_DOWN = ("Count down from {b} to {a}.", "Count backwards from {b} to {a}.",
         "Count from {b} down to {a}.")  # fmt: skip


# whose place in the alphabet the model knows; it is too small to compare words letter by letter
SORTED_NOUNS = NOUNS[:110]
SORTED_NAMES = NAMES[:52]


def _words(rng: random.Random, count: int) -> list[str]:
    if rng.random() < 0.06:
        return [made_up(rng, capital=False) for _ in range(min(count, 4))]
    pool: Sequence[str] = rng.choice((NOUNS, NOUNS, NOUNS, NAMES, COLOURS))
    return rng.sample(pool, count)


def _sortable(rng: random.Random, count: int) -> list[str]:
    return rng.sample(rng.choice((SORTED_NOUNS, SORTED_NOUNS, SORTED_NAMES, COLOURS)), count)


def _numbers(rng: random.Random, count: int) -> list[str]:
    top = rng.choice((20, 99, 99, 99))
    return [str(value) for value in rng.sample(range(top + 1), count)]


def _close_numbers(rng: random.Random, count: int) -> list[str]:
    """Draw one-digit numbers among others, or numbers with the same tens: hardest to sort."""
    if rng.random() < 0.6:
        pool = [*range(10), *rng.sample(range(10, 100), 8)]
    else:
        low = 10 * rng.randint(1, 8)
        pool = [*range(low, low + 20)]
    return [str(value) for value in rng.sample(pool, count)]


def _length(rng: random.Random) -> int:
    return rng.choice((2, 3, 3, 3, 4, 4, 4, 5, 5))


def _shown(rng: random.Random, items: Sequence[str]) -> tuple[str, str]:
    """Return the list as the user types it, and the separator of the answer."""
    roll = rng.random()
    if roll < 0.72:
        return ", ".join(items), ", "
    if roll < 0.88:
        return " ".join(items), " "
    return "[" + ", ".join(items) + "]", "[]"


def _written(items: Sequence[str], separator: str) -> str:
    return "[" + ", ".join(items) + "]" if separator == "[]" else separator.join(items)


def _ask(rng: random.Random, text: str) -> str:
    return text if rng.random() < 0.7 else text[:1].lower() + text[1:]


def reverse(rng: random.Random) -> Example:
    """Reverse a list of words or numbers."""
    count = _length(rng)
    items = _numbers(rng, count) if rng.random() < 0.35 else _words(rng, count)
    shown, separator = _shown(rng, items)
    _, template = choose(rng, _REVERSE)
    text = _ask(rng, template.format(x=shown))
    messages = [*maybe_system(rng, 0.1), user(text), assistant(_written(items[::-1], separator))]
    return Example("reverse", messages, (key_of("reverse", *items),))


def sort(rng: random.Random) -> Example:
    """Sort words alphabetically or numbers by size."""
    count = rng.choice((2, 3, 3, 3, 4, 4, 4, 5))
    order = "up"
    if rng.random() < 0.5:
        items = _numbers(rng, count)
        order = rng.choice(("up", "up", "down"))
        template = rng.choice(_SORT_UP if order == "up" else _SORT_DOWN)
        done = sorted(items, key=int, reverse=order == "down")
    else:
        items = _sortable(rng, count)
        template = rng.choice(_SORT_WORDS)
        done = sorted(items)
    shown, separator = _shown(rng, items)
    text = _ask(rng, template.format(x=shown))
    messages = [*maybe_system(rng, 0.1), user(text), assistant(_written(done, separator))]
    return Example("sort", messages, (key_of("sort", order, *items),))


def _sentence(rng: random.Random) -> str:
    first, second = rng.choice(NOUNS), rng.choice(NOUNS)
    return rng.choice((
        f"the {rng.choice(ADJECTIVES)} {first} {rng.choice(VERBS)} the {second}",
        f"{rng.choice(NAMES)} {rng.choice(VERBS)} a {rng.choice(ADJECTIVES)} {first} in "
        f"{rng.choice(CITIES)}.",
        f"The {first} is {rng.choice(ADJECTIVES)} and the {second} is {rng.choice(ADJECTIVES)}.",
        f"{made_up(rng)} and {made_up(rng)} like {first}.",
        f"{rng.choice(NOUNS)} {scrambled(rng)} {rng.choice(ADJECTIVES)} {scrambled(rng)}",
        f"{rng.randint(0, 9999)} {first} and {rng.randint(0, 99)} {second}!",
    ))  # fmt: skip


def copy(rng: random.Random) -> Example:
    """Repeat a text, a list or a single word."""
    roll = rng.random()
    if roll < 0.4:
        items = _words(rng, _length(rng)) if rng.random() < 0.7 else _numbers(rng, _length(rng))
        answer, _ = _shown(rng, items)
        text = _ask(rng, rng.choice(_COPY).format(x=answer))
    elif roll < 0.75:
        answer = _sentence(rng)
        text = _ask(rng, rng.choice(_COPY).format(x=answer))
    elif roll < 0.9:
        answer = rng.choice((rng.choice(NOUNS), made_up(rng), rng.choice(NAMES), scrambled(rng),
                             rng.choice(("yes", "no", "ok", "hello", "OK", "hi"))))  # fmt: skip
        text = _ask(rng, rng.choice(_SAY).format(x=answer))
    else:
        word, times = rng.choice(NOUNS), rng.randint(2, 6)
        answer = " ".join([word] * times)
        text = casual(rng, rng.choice(_TIMES).format(x=word, n=times))
    messages = [*maybe_system(rng, 0.1), user(text), assistant(answer)]
    return Example("copy", messages, (key_of("copy", answer),))


def count(rng: random.Random) -> Example:
    """Count up or down between two numbers."""
    low = 1 if rng.random() < 0.4 else rng.randint(0, 80)
    span = rng.randint(3, 14) if rng.random() < 0.9 else rng.randint(15, 30)
    high = min(low + span, 100)
    numbers = list(range(low, high + 1))
    down = rng.random() < 0.25
    if down:
        template = rng.choice(_DOWN)
        numbers.reverse()
    else:
        template = rng.choice(_COUNT_TO if low == 1 and rng.random() < 0.4 else _COUNT)
    text = casual(rng, template.format(a=low, b=high))
    messages = [*maybe_system(rng, 0.1), user(text), assistant(", ".join(map(str, numbers)))]
    return Example("count", messages, (key_of("count", low, high, down),))


def _anything(rng: random.Random, count: int) -> list[str]:
    pool = rng.randrange(5)
    if pool == 0:
        return [made_up(rng, capital=rng.random() < 0.5) for _ in range(count)]
    if pool == 1:
        return [scrambled(rng, 1, 4) for _ in range(count)]
    if pool == 2:
        return [str(rng.randint(0, 99)) for _ in range(count)]
    return [
        rng.choice(NOUNS if pool == 3 else (*NAMES, *CITIES, *ADJECTIVES)) for _ in range(count)
    ]


def _repeated(rng: random.Random) -> tuple[str, str, str]:
    word, times = rng.choice(NOUNS), rng.randint(2, 6)
    answer = " ".join([word] * times)
    return f"Say {word} {times} times.", answer, key_of("copy", answer)


def _counted(rng: random.Random) -> tuple[str, str, str]:
    span = rng.randint(3, 12) if rng.random() < 0.6 else rng.randint(13, 31)
    low = rng.choice((0, 1, rng.randint(0, 99 - span)))
    high, down = low + span, rng.random() < 0.4
    numbers = [*range(low, high + 1)]
    asked = f"Count down from {high} to {low}." if down else f"Count from {low} to {high}."
    answer = ", ".join(map(str, reversed(numbers) if down else numbers))
    return asked, answer, key_of("count", low, high, down)


def _sorted(rng: random.Random) -> tuple[str, str, str]:
    count, separator = rng.randint(2, 6), rng.choice((", ", " "))
    asked, order = "Sort", "up"
    if rng.random() < 0.4:
        items = _sortable(rng, count)
        done = sorted(items)
    else:
        items = (_close_numbers if rng.random() < 0.5 else _numbers)(rng, count)
        if rng.random() < 0.4:
            asked, order = "Sort in descending order", "down"
        done = sorted(items, key=int, reverse=order == "down")
    key = key_of("sort", order, *items)
    return f"{asked}: {separator.join(items)}", separator.join(done), key


def _reversed(rng: random.Random) -> tuple[str, str, str]:
    items, separator = _anything(rng, rng.randint(3, 8)), rng.choice((", ", " "))
    shown, answer = separator.join(items), separator.join(items[::-1])
    return f"Reverse: {shown}", answer, key_of("reverse", *items)


def _copied(rng: random.Random) -> tuple[str, str, str]:
    answer = rng.choice((", ", " ")).join(_anything(rng, rng.randint(3, 12)))
    return f"Copy: {answer}", answer, key_of("copy", answer)


_DRILLS = (_copied, _copied, _reversed, _reversed, _sorted, _sorted, _sorted, _counted, _repeated)


def _drilled(kind: str, tasks: Sequence[tuple[str, str, str]]) -> Example:
    pieces: list[tuple[str, bool]] = []
    for asked, answer, _ in tasks:
        pieces += [(f"{asked}\n", False), (f"{answer}\n", True)]
    return Example(kind, [], tuple(key for _, _, key in tasks), drill=pieces)


def drill(rng: random.Random) -> Example:
    """Draw bare lists to copy, reverse, sort and count, which teach more copying per token."""
    return _drilled("copy", [rng.choice(_DRILLS)(rng) for _ in range(rng.choice((2, 3, 4)))])


def sort_drill(rng: random.Random) -> Example:
    """Draw bare lists to sort, twice as many per token as in conversations."""
    return _drilled("sort", [_sorted(rng) for _ in range(rng.choice((4, 5, 6)))])
