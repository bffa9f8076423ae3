"""Additions and subtractions of numbers up to 99, and two-step word problems with reasoning."""

from __future__ import annotations

import random

from tools.train.data.base import (
    Example,
    assistant,
    bucket,
    casual,
    choose,
    key_of,
    maybe_system,
    user,
)
from tools.train.data.words import NAMES

_ADD = (
    "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "What is {a} plus {b}?",
    "Calculate {a} + {b}.", "How much is {a} plus {b}?", "Add {a} and {b}.", "{a} plus {b}",
    "Compute {a}+{b}.", "What is the sum of {a} and {b}?", "Can you add {a} and {b}?",
    "What do you get if you add {b} to {a}?", "{a}+{b}=?", "What's {a}+{b}?",
    "What's {a} + {b}?", "Sum {a} and {b}.", "How much is {a} + {b}?", "Solve {a} + {b}.",
    "What does {a} + {b} equal?", "{a} and {b} together make what?",
)  # fmt: skip

_SUB = (
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} =", "What is {a} minus {b}?",
    "Calculate {a} - {b}.", "How much is {a} minus {b}?", "Subtract {b} from {a}.", "{a} minus {b}",
    "Compute {a}-{b}.", "What is {b} less than {a}?", "Can you subtract {b} from {a}?",
    "What do you get if you take {b} from {a}?", "{a}-{b}=?", "What's {a}-{b}?",
    "What's {a} - {b}?", "Take {b} away from {a}.", "How much is {a} - {b}?", "Solve {a} - {b}.",
    "What does {a} - {b} equal?",
)  # fmt: skip

_ONLY = (
    " Answer with just the number.", " Only the number.", " Reply with the number only.",
    " Give only the result.", " Just the number, please.",
)  # fmt: skip


def operand(rng: random.Random) -> int:
    """Draw a number, mostly of two digits, sometimes of one."""
    return rng.randint(10, 99) if rng.random() < 0.88 else rng.randint(0, 9)


def close_pair(rng: random.Random) -> tuple[int, int]:
    """Draw two operands at most ten apart, or one of a single digit: rare, and hardest."""
    if rng.random() < 0.4:
        pair = [rng.randint(0, 9), operand(rng)]
        rng.shuffle(pair)
        return pair[0], pair[1]
    a = operand(rng)
    return a, min(99, max(0, a + rng.randint(-10, 10)))


def sum_key(operator: str, a: int, b: int) -> str:
    """Return the key of a sum; both orders of an addition have the same key."""
    if operator == "+":
        a, b = sorted((a, b))
    return key_of("sum", operator, a, b)


def apply(operator: str, a: int, b: int) -> int:
    """Return the result of a sum."""
    return a + b if operator == "+" else a - b


def arithmetic(rng: random.Random) -> Example:
    """Draw one sum in one of many phrasings."""
    a, b = operand(rng), operand(rng)
    operator = rng.choice("+-")
    if operator == "-" and a < b and rng.random() < 0.6:
        a, b = b, a
    _, template = choose(rng, _ADD if operator == "+" else _SUB)
    text = casual(rng, template.format(a=a, b=b))
    result = apply(operator, a, b)
    answer = f"{a} {operator} {b} = {result}"
    if rng.random() < 0.15:
        text = text.rstrip("?. ") + rng.choice(".?") + rng.choice(_ONLY)
        answer = str(result)
    messages = [*maybe_system(rng), user(text), assistant(answer)]
    return Example("arithmetic", messages, (sum_key(operator, a, b),))


def only_result(rng: random.Random) -> Example:
    """Draw one sum whose answer must be the number alone, which is harder."""
    while True:
        example = arithmetic(rng)
        if "=" not in example.messages[-1]["content"]:
            return example


def drill(rng: random.Random) -> Example:
    """Draw bare sums, which teach more sums per token than conversations."""
    pieces: list[tuple[str, bool]] = []
    keys: list[str] = []
    while len(keys) < 12:
        operator = rng.choice("+-")
        a, b = close_pair(rng) if rng.random() < 0.35 else (operand(rng), operand(rng))
        key = sum_key(operator, a, b)
        if bucket(key) == "train":
            keys.append(key)
            result = apply(operator, a, b)
            pieces += [(f"{a} {operator} {b} =", False), (f" {result}\n", True)]
    return Example("arithmetic", [], tuple(keys), drill=pieces)


_THINGS = (
    "apples", "books", "coins", "stamps", "pens", "cards", "balls", "eggs", "shells", "cookies",
    "toys", "flowers", "marbles", "tickets", "plums", "stones",
)  # fmt: skip

_STARTS = ("{n} has {a} {t}.", "{n} had {a} {t}.", "There are {a} {t} on {n}'s table.",
           "{n} starts with {a} {t}.", "{n} owns {a} {t}.")  # fmt: skip
_MORE = ("{n} buys {x} more", "{n} gets {x} more", "{n} finds {x} more", "a friend brings {x} more",
         "{n} wins {x} more")  # fmt: skip
_LESS = ("{n} gives away {x}", "{n} loses {x}", "{n} sells {x}", "{n} gives {x} to a friend",
         "{n} uses {x}")  # fmt: skip
_ENDS = ("How many {t} are there now?", "How many {t} does {n} have now?", "How many {t} are left?",
         "How many {t} does {n} have?")  # fmt: skip
_PLAIN = ("What is {a} {o} {b} {p} {c}?", "{a} {o} {b} {p} {c}", "Calculate {a} {o} {b} {p} {c}.",
          "{a}{o}{b}{p}{c}")  # fmt: skip


def word_problem(rng: random.Random) -> Example:
    """Draw a two-step problem, solved in the think block or, without one, in the answer."""
    while True:
        a, b, c = rng.randint(2, 70), rng.randint(2, 40), rng.randint(2, 40)
        first, second = rng.choice("+-"), rng.choice("+-")
        middle = apply(first, a, b)
        if 0 <= middle <= 99 and apply(second, middle, c) >= 0:
            break
    result = apply(second, middle, c)
    name, things = rng.choice(NAMES), rng.choice(_THINGS)
    if rng.random() < 0.2:
        text = rng.choice(_PLAIN).format(a=a, b=b, c=c, o=first, p=second)
    else:
        steps = [
            rng.choice(_MORE if operator == "+" else _LESS).format(n=who, x=amount)
            for operator, amount, who in (
                (first, b, name),
                (second, c, "then"),
            )
        ]
        second_step = steps[1].removeprefix("then ")
        link = rng.choice((". Then {w} {s}. ", " and then {s}. ", ". After that {w} {s}. "))
        if "friend brings" in second_step:
            second_step = second_step.replace("a friend brings", "gets")
        step = steps[0][0].upper() + steps[0][1:]
        text = rng.choice(_STARTS).format(n=name, a=a, t=things) + " " + step
        text += link.format(w=name, s=second_step)
        text += rng.choice(_ENDS).format(n=name, t=things)
    work = f"{a} {first} {b} = {middle}\n{middle} {second} {c} = {result}"
    keys = (
        key_of("steps", a, first, b, second, c),
        sum_key(first, a, b),
        sum_key(second, middle, c),
    )
    if rng.random() < 0.75:
        turn = assistant(f"The answer is {result}.", work)
        thinking = True
    else:
        turn = assistant(f"{work}\nThe answer is {result}.")
        thinking = False
    messages = [*maybe_system(rng, 0.1), user(text), turn]
    return Example("think", messages, keys, thinking=thinking)
