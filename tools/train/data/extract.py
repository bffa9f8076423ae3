"""Extraction of a sentence's fields as JSON, with the requested keys."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from tools.train.data.base import (
    Example,
    Message,
    assistant,
    join_and,
    key_of,
    made_up,
    maybe_system,
    scrambled,
    system,
    user,
)
from tools.train.data.words import CITIES, COLOURS, DAYS, JOBS, NAMES, NOUNS, split_words


@dataclass(frozen=True)
class Kind:
    """Sentences of one kind, and the alternative names of their fields."""

    sentences: tuple[str, ...]
    names: dict[str, tuple[str, ...]]


_KINDS = {
    "person": Kind(
        ("{name} is {age} years old and lives in {city}.", "{name} is {age} and lives in {city}.",
         "{name}, {age}, lives in {city}.", "{name} lives in {city} and is {age} years old.",
         "My name is {name}, I am {age} years old and I live in {city}.",
         "I am {name}, {age}, from {city}.", "{name} from {city} is {age} years old.",
         "In {city} lives {name}, who is {age}.", "{name} ({age}) comes from {city}."),
        {"name": ("name", "name", "person", "first_name"), "age": ("age", "age", "age", "years"),
         "city": ("city", "city", "location", "place", "town")},
    ),
    "worker": Kind(
        ("{name} works as a {job} in {city}.", "{name} is a {job} in {city}.",
         "{name} is a {job} from {city}.", "The {job} {name} lives in {city}.",
         "{name} has a job as a {job} in {city}."),
        {"name": ("name", "name", "person"), "job": ("job", "job", "profession", "occupation"),
         "city": ("city", "city", "location", "place")},
    ),
    "order": Kind(
        ("{name} buys {count} {item}s for {price} dollars.",
         "{name} ordered {count} {item}s for {price} euros.",
         "I want to order {count} {item}s for {price} dollars, says {name}.",
         "{name} paid {price} dollars for {count} {item}s.",
         "{count} {item}s cost {name} {price} euros."),
        {"name": ("name", "customer", "buyer"), "count": ("quantity", "count", "amount"),
         "item": ("item", "product"), "price": ("price", "price", "cost", "total")},
    ),
    "event": Kind(
        ("The {event} with {name} is on {day} at {time}.",
         "{name} has a {event} on {day} at {time}.", "On {day} at {time}, {name} has a {event}.",
         "Meet {name} for a {event} on {day} at {time}.",
         "There is a {event} with {name} at {time} on {day}."),
        {"event": ("event", "title", "type"), "name": ("name", "person", "with"),
         "day": ("day", "day", "date"), "time": ("time", "time", "hour")},
    ),
    "trip": Kind(
        ("{name} travels from {origin} to {city} on {day}.",
         "On {day}, {name} flies from {origin} to {city}.",
         "{name} takes the train from {origin} to {city} on {day}.",
         "{name} goes to {city} from {origin} on {day}."),
        {"name": ("name", "traveller", "passenger"), "origin": ("from", "origin", "start"),
         "city": ("to", "destination", "city"), "day": ("day", "date")},
    ),
    "product": Kind(
        ("The {colour} {item} costs {price} dollars.", "A {colour} {item} for {price} euros.",
         "We sell a {colour} {item} at {price} dollars.",
         "The {item} is {colour} and costs {price} dollars."),
        {"colour": ("colour", "color"), "item": ("item", "product", "name"),
         "price": ("price", "cost")},
    ),
    "contact": Kind(
        ("{name} can be reached at {email}.", "The email of {name} is {email}.",
         "Write to {name} at {email}.", "{name}'s email address is {email}."),
        {"name": ("name", "person"), "email": ("email", "mail", "address")},
    ),
}  # fmt: skip

_EVENTS = split_words("meeting call lunch dinner concert party workshop lesson interview exam")

_ASKS = (
    "Extract {k} as JSON: {s}", "Extract the {k} as JSON: {s}",
    "{s}\nReturn JSON with the keys {k}.",
    "Return JSON with {k}: {s}", "Give me {k} from this text as JSON: {s}",
    "{s} Extract {k} as JSON.", "Extract JSON with the keys {k} from: {s}",
    "Text: {s}\nKeys: {k}\nJSON:", "{s}\nAnswer in JSON with {k}.",
    "Extract the fields {k} from this sentence as JSON: {s}", "Turn this into JSON with {k}: {s}",
    "What are the {k}? Answer as JSON. {s}", "{s} Give the {k} as a JSON object.",
    "Extract the {k} from this sentence. {s} Answer in JSON.",
)  # fmt: skip
_SYSTEMS = (
    "Answer only in JSON with the keys {k}.", "Extract {k} as JSON.",
    "Reply with a JSON object with {k}.", "Return only JSON. Keys: {k}.",
    "You extract data. Answer in JSON with the keys {k}.",
)  # fmt: skip
_SCHEMA_ASKS = (
    "Answer with JSON for this schema: {j}\n{s}", "{s}\nUse this JSON schema: {j}",
    "Extract JSON. Schema: {j}\nText: {s}",
)  # fmt: skip


def _values(rng: random.Random) -> dict[str, Any]:
    name = made_up(rng) if rng.random() < 0.3 else rng.choice(NAMES)
    origin, city = rng.sample(CITIES, 2)
    if rng.random() < 0.2:
        city = made_up(rng)
    user_name = name.lower() if rng.random() < 0.5 else scrambled(rng)
    host = rng.choice((*NOUNS, "example", "mail", "test"))
    return {
        "name": name,
        "age": rng.randint(1, 99),
        "city": city,
        "origin": origin,
        "job": rng.choice(JOBS),
        "count": rng.randint(2, 99),
        "item": made_up(rng, capital=False) if rng.random() < 0.15 else rng.choice(NOUNS),
        "price": rng.randint(1, 300) if rng.random() < 0.8 else rng.randint(1, 99) + 0.5,
        "event": rng.choice(_EVENTS),
        "day": rng.choice(DAYS),
        "time": rng.choice((f"{rng.randint(0, 23)}:{rng.choice(('00', '15', '30', '45'))}",
                            f"{rng.randint(1, 12)} {rng.choice(('am', 'pm'))}")),
        "colour": rng.choice(COLOURS),
        "email": f"{user_name}@{host}.{rng.choice(('com', 'org', 'net'))}",
    }  # fmt: skip


def _keys_text(rng: random.Random, names: list[str]) -> str:
    roll = rng.random()
    if roll < 0.45:
        return join_and(names)
    if roll < 0.85:
        return ", ".join(names)
    return ", ".join(f'"{name}"' for name in names)


def extract(rng: random.Random) -> Example:
    """Draw a sentence, and the JSON object of the requested fields, in the requested order."""
    what = rng.choice(("person", "person", *_KINDS))
    kind = _KINDS[what]
    values = _values(rng)
    sentence = rng.choice(kind.sentences).format(**values)
    fields = rng.sample(list(kind.names), rng.randint(1, len(kind.names)))
    if rng.random() < 0.5:
        fields = [field for field in kind.names if field in fields]
    if rng.random() < 0.4:
        fields = list(kind.names)
    names = [rng.choice(kind.names[field]) for field in fields]
    if what == "order" and "item" in fields and rng.random() < 0.0:
        sentence = sentence.replace(values["item"] + "s", values["item"])
    found = {
        name: values[field] + "s" if field == "item" and what == "order" else values[field]
        for name, field in zip(names, fields, strict=True)
    }
    messages: list[Message]
    roll = rng.random()
    listed = _keys_text(rng, names)
    if roll < 0.72:
        ask = rng.choice(_ASKS)
        text = ask.format(k=listed, s=sentence)
        if rng.random() < 0.2:
            text = text[:1].lower() + text[1:] if ask[0] != "{" else text
        messages = [*maybe_system(rng, 0.1), user(text)]
    elif roll < 0.88:
        messages = [system(rng.choice(_SYSTEMS).format(k=listed)), user(sentence)]
    else:
        kinds = {str: "string", int: "integer", float: "number"}
        schema = {
            "type": "object",
            "properties": {name: {"type": kinds[type(value)]} for name, value in found.items()},
        }
        text = rng.choice(_SCHEMA_ASKS).format(j=json.dumps(schema), s=sentence)
        messages = [*maybe_system(rng, 0.1), user(text)]
    answer = json.dumps(found, ensure_ascii=False)
    key = key_of("extract", what, sentence, *names)
    return Example("extract", [*messages, assistant(answer)], (key,))
