"""Facts: capitals, chemical symbols, opposites, calendar neighbours and so on."""

from __future__ import annotations

import random

from tools.train.data import facts_table as table
from tools.train.data.base import Example, assistant, choose, key_of, maybe_system, user
from tools.train.data.words import DAYS, MONTHS

_CAPITAL_OF = (
    "What is the capital of {x}?", "Capital of {x}?", "Tell me the capital of {x}.",
    "Which city is the capital of {x}?", "What's the capital of {x}?", "Name the capital of {x}.",
    "What is the capital city of {x}?", "{x}'s capital?", "Do you know the capital of {x}?",
    "The capital of {x} is", "Give me the capital of {x}.", "What city is the capital of {x}?",
    "I want to know the capital of {x}.", "Can you tell me the capital of {x}?",
)  # fmt: skip
_COUNTRY_OF = (
    "{x} is the capital of which country?", "Which country has the capital {x}?",
    "What country is {x} the capital of?", "Of which country is {x} the capital?",
    "Which country's capital is {x}?", "{x} is the capital of what country?",
    "Name the country whose capital is {x}.", "{x} is the capital of",
    "Tell me which country has {x} as its capital.",
)  # fmt: skip
_SYMBOL_OF = (
    "What is the chemical symbol for {x}?", "What is the chemical symbol of {x}?",
    "Chemical symbol for {x}?", "What's the symbol for {x}?", "Symbol of {x}?",
    "Give me the chemical symbol of {x}.", "Which symbol does {x} have?",
    "Tell me the chemical symbol of {x}.",
)  # fmt: skip
_ELEMENT_OF = (
    "Which element has the symbol {x}?", "What element is {x}?", "Name the element {x}.",
    "What does the chemical symbol {x} stand for?", "Which chemical element is {x}?",
    "{x} is the symbol of which element?",
)  # fmt: skip
_OPPOSITE = (
    "What is the opposite of {x}?", "Opposite of {x}?", "Tell me the opposite of {x}.",
    "What's the opposite of {x}?", "Give me the opposite of {x}.", "The opposite of {x} is",
    "Name the opposite of {x}.", "Which word is the opposite of {x}?",
)  # fmt: skip
_AFTER = ("What {u} comes after {x}?", "Which {u} comes after {x}?", "What is the {u} after {x}?",
          "What {u} follows {x}?", "{x} is followed by which {u}?",
          "Name the {u} after {x}.")  # fmt: skip
_BEFORE = ("What {u} comes before {x}?", "Which {u} comes before {x}?",
           "What is the {u} before {x}?",
           "What {u} precedes {x}?", "Name the {u} before {x}.")  # fmt: skip
_WORD = ("Write {x} in words.", "Write the number {x} as a word.", "How do you write {x} in words?",
         "Spell the number {x}.", "{x} in words?", "What is {x} in words?")  # fmt: skip
_NUMBER = ("Write {x} as a number.", "Write {x} in digits.", "What number is {x}?",
           "{x} in digits?", "Which number is {x}?", "What is {x} as a number?")  # fmt: skip
_SOUND = ("What sound does a {x} make?", "What does a {x} say?", "What noise does a {x} make?",
          "Which sound does a {x} make?", "How does a {x} sound?")  # fmt: skip
_COLOUR = ("What colour is {x}?", "What color is {x}?", "Which colour does {x} have?",
           "What is the colour of {x}?", "Tell me the colour of {x}.",
           "Which color is {x}?")  # fmt: skip
_TIMES = ("What is {a} times {b}?", "{a} * {b}", "{a} x {b}", "Multiply {a} by {b}.",
          "What is {a} * {b}?", "{a}*{b}", "How much is {a} times {b}?",
          "What is {a} x {b}?")  # fmt: skip


# Relation, subject, index of the phrasing, question and answer.
Fact = tuple[str, str, int, str, str]


def _neighbour(rng: random.Random) -> Fact:
    unit, names = rng.choice((("day", DAYS), ("month", MONTHS)))
    place = rng.randrange(len(names))
    step = rng.choice((1, -1))
    index, template = choose(rng, _AFTER if step == 1 else _BEFORE)
    other = names[(place + step) % len(names)]
    side = "after" if step == 1 else "before"
    text = template.format(u=unit, x=names[place])
    return side, names[place], index, text, f"The {unit} {side} {names[place]} is {other}."


def _capital(rng: random.Random) -> Fact:
    country, city = rng.choice(table.CAPITALS)
    index, template = choose(rng, _CAPITAL_OF)
    answer = f"The capital of {country} is {city}."
    return "capital", country, index, template.format(x=country), answer


def _country(rng: random.Random) -> Fact:
    country, city = rng.choice(table.CAPITALS)
    index, template = choose(rng, _COUNTRY_OF)
    return "country", city, index, template.format(x=city), f"{city} is the capital of {country}."


def _element(rng: random.Random) -> Fact:
    element, symbol = rng.choice(table.ELEMENTS)
    if rng.random() < 0.5:
        index, template = choose(rng, _SYMBOL_OF)
        answer = f"The chemical symbol for {element} is {symbol}."
        return "symbol", element, index, template.format(x=element), answer
    index, template = choose(rng, _ELEMENT_OF)
    answer = f"{symbol} is the symbol of {element}."
    return "element", symbol, index, template.format(x=symbol), answer


def _opposite(rng: random.Random) -> Fact:
    left, right = rng.choice(table.OPPOSITES)
    if rng.random() < 0.5 and left != "heavy":
        left, right = right, left
    index, template = choose(rng, _OPPOSITE)
    return "opposite", left, index, template.format(x=left), f"The opposite of {left} is {right}."


def _number(rng: random.Random) -> Fact:
    value = rng.randint(0, 99) if rng.random() < 0.7 else rng.randint(0, 20)
    word = table.number_word(value)
    if rng.random() < 0.5:
        index, template = choose(rng, _WORD)
        return "word", str(value), index, template.format(x=value), f"{value} is {word}."
    index, template = choose(rng, _NUMBER)
    return "number", word, index, template.format(x=word), f"{word.capitalize()} is {value}."


def _product(rng: random.Random) -> Fact:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    index, template = choose(rng, _TIMES)
    return "times", f"{a}x{b}", index, template.format(a=a, b=b), f"{a} * {b} = {a * b}"


def _sound(rng: random.Random) -> Fact:
    animal, sound = rng.choice(table.SOUNDS)
    index, template = choose(rng, _SOUND)
    return "sound", animal, index, template.format(x=animal), f"A {animal} says {sound}."


def _colour(rng: random.Random) -> Fact:
    thing, colour = rng.choice(table.THING_COLOURS)
    index, template = choose(rng, _COLOUR)
    answer = f"{thing[0].upper()}{thing[1:]} is {colour}."
    return "colour", thing, index, template.format(x=thing), answer


_RELATIONS = (_capital, _country, _element, _opposite, _neighbour, _number, _product, _sound,
              _colour)  # fmt: skip
_SHARES = (36, 32, 11, 6, 5, 4, 4, 1, 1)
_DRILLED = (36, 32, 11, 6, 10, 8, 8, 1, 1)


def drill(rng: random.Random) -> Example:
    """Draw bare statements, which teach more facts per token than conversations."""
    pieces: list[tuple[str, bool]] = []
    for _ in range(rng.randint(8, 14)):
        answer = rng.choices(_RELATIONS, _DRILLED)[0](rng)[-1]
        verb = next(verb for verb in (" is", " =", " says") if verb in answer)
        head = answer[: answer.index(verb) + len(verb)]
        pieces += [(head, False), (answer.removeprefix(head) + "\n", True)]
    return Example("facts", [], ("drill",), drill=pieces)


def facts(rng: random.Random) -> Example:
    """Draw one fact in one phrasing, sometimes carelessly typed."""
    relation, subject, index, text, answer = rng.choices(_RELATIONS, _SHARES)[0](rng)
    roll = rng.random()
    text = text[:1].upper() + text[1:]
    if roll < 0.12:
        text = text.rstrip("?.")
    elif roll < 0.32 and relation != "element":
        text = text.lower().rstrip("?." if roll < 0.26 else "")
    elif roll < 0.40 and relation not in ("element", "country"):
        text = rng.choice(("Please ", "Hi, ", "Hey, ", "And ")) + text[:1].lower() + text[1:]
    messages = [*maybe_system(rng), user(text), assistant(answer)]
    return Example("facts", messages, (key_of("fact", relation, subject, index),))
