"""The tools that training conversations offer, with the ways users ask for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.train.data.base import made_up, scrambled
from tools.train.data.words import CITIES, COLOURS, DAYS, FOODS, NAMES, NOUNS

Maker = Callable[[random.Random], Any]


@dataclass(frozen=True)
class Param:
    """A parameter: the names it may have, its JSON type, a description and its values."""

    names: tuple[str, ...]
    kind: str
    about: str
    make: Maker
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tool:
    """A tool: names, descriptions, parameters, requests, and results with their answers."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    params: dict[str, Param]
    asks: tuple[str, ...]
    results: tuple[tuple[str, str], ...]
    optional: tuple[str, ...] = ()


def _city(rng: random.Random) -> str:
    return made_up(rng) if rng.random() < 0.15 else rng.choice(CITIES)


def _person(rng: random.Random) -> str:
    return made_up(rng) if rng.random() < 0.2 else rng.choice(NAMES)


def _noun(rng: random.Random) -> str:
    return made_up(rng, capital=False) if rng.random() < 0.15 else rng.choice(NOUNS)


def _between(low: int, high: int) -> Maker:
    return lambda rng: rng.randint(low, high)


def _any(*pool: str) -> Maker:
    return lambda rng: rng.choice(pool)


def _text(rng: random.Random) -> str:
    return rng.choice((
        f"I am in {rng.choice(CITIES)}", f"see you on {rng.choice(DAYS)}", "I will be late",
        f"bring the {rng.choice(NOUNS)}", f"buy {rng.choice(FOODS)}", "happy birthday",
        f"call {rng.choice(NAMES)}", f"the {rng.choice(NOUNS)} is ready",
    ))  # fmt: skip


def _expression(rng: random.Random) -> str:
    return f"{rng.randint(1, 999)} {rng.choice('+-*/')} {rng.randint(1, 99)}"


CITY = Param(("city", "city", "location", "place"), "string", "The city", _city)
UNITS = ("celsius", "fahrenheit")
LANGUAGES = ("French", "German", "Spanish", "Italian", "Dutch", "Polish", "Greek", "Japanese")
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF", "CAD")
ROOMS = ("kitchen", "bedroom", "bathroom", "garage", "garden", "office", "hall", "living room")

TOOLS = (
    Tool(
        ("get_weather", "get_weather", "get_current_weather", "weather", "weather_lookup"),
        ("Get the weather in a city", "Get the current weather", "Weather for a location"),
        {"city": CITY},
        ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?",
         "What's the weather like in {city}?", "Is it raining in {city}?",
         "Tell me the weather in {city}.", "How warm is it in {city}?"),
        (('{{"temperature": {i}, "condition": "{w}"}}', "It is {i} degrees and {w} in {city}."),
         ('{{"temp": {i}, "sky": "{w}"}}', "It is {i} degrees and {w} in {city}."),
         ("{w}, {i} degrees", "It is {i} degrees and {w} in {city}."),
         ("{i}C and {w}", "It is {i} degrees and {w} in {city}.")),
    ),
    Tool(
        ("get_weather", "get_current_weather", "get_forecast", "weather_in_unit"),
        ("Get the weather in a city", "Get the weather in a given unit"),
        {"city": CITY, "unit": Param(("unit", "unit", "units"), "string", "Temperature unit",
                                     _any(*UNITS), UNITS)},
        ("What is the weather in {city} in {unit}?", "How warm is it in {city} in {unit}?",
         "Weather in {city}, {unit} please.", "Give me the temperature in {city} in {unit}.",
         "What is the weather in {city}?", "What's the weather like in {city}?",
         "How is the weather in {city}?", "Tell me the weather in {city}."),
        (('{{"temperature": {i}, "condition": "{w}"}}', "It is {i} degrees and {w} in {city}."),),
        optional=("unit",),
    ),
    Tool(
        ("get_time", "get_current_time", "time_in", "clock"),
        ("Get the time in a city", "Current local time"),
        {"city": CITY},
        ("What time is it in {city}?", "Tell me the time in {city}.", "Time in {city}?",
         "What is the local time in {city}?"),
        (('{{"time": "{h}"}}', "It is {h} in {city}."), ("{h}", "It is {h} in {city}.")),
    ),
    Tool(
        ("calculator", "calculate", "calc", "evaluate"),
        ("Evaluate an expression", "A calculator"),
        {"expression": Param(("expression", "expression", "formula"), "string",
                             "The expression", _expression)},
        ("Use the calculator: {expression}", "Calculate {expression} with the tool.",
         "Calculate {expression}", "What is {expression}?", "Compute {expression}."),
        (('{{"result": {i}}}', "The result is {i}."), ("{i}", "The result is {i}.")),
    ),
    Tool(
        ("add", "add_numbers", "sum_numbers"),
        ("Add two numbers",),
        {"a": Param(("a", "x", "first"), "integer", "First number", _between(1, 999)),
         "b": Param(("b", "y", "second"), "integer", "Second number", _between(1, 999))},
        ("Add {a} and {b}.", "What is {a} plus {b}?", "What is {a} + {b}?", "Sum {a} and {b}."),
        (('{{"result": {i}}}', "The result is {i}."), ("{i}", "The result is {i}.")),
    ),
    Tool(
        ("search", "web_search", "search_web", "lookup"),
        ("Search the web", "Look something up"),
        {"query": Param(("query", "query", "q"), "string", "What to search for",
                        lambda rng: f"{_noun(rng)} {_noun(rng)}")},
        ("Search for {query}.", "Search the web for {query}.", "Look up {query}.",
         "Find information about {query}."),
        (('{{"title": "{t}"}}', "I found: {t}"), ("{t}", "I found: {t}")),
    ),
    Tool(
        ("send_message", "send_text", "message"),
        ("Send a message to a person",),
        {"to": Param(("to", "recipient", "name"), "string", "Who gets it", _person),
         "text": Param(("text", "message", "body"), "string", "The message", _text)},
        ("Send {to} a message: {text}", "Text {to}: {text}", "Write to {to}: {text}",
         "Tell {to}: {text}"),
        (('{{"status": "sent"}}', "The message to {to} was sent."),
         ("sent", "The message to {to} was sent.")),
    ),
    Tool(
        ("set_timer", "start_timer", "timer"),
        ("Set a timer",),
        {"minutes": Param(("minutes", "minutes", "duration"), "integer", "Length in minutes",
                          _between(1, 90))},
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
         "Timer for {minutes} minutes", "Wake me in {minutes} minutes."),
        (('{{"status": "ok"}}', "The timer is set for {minutes} minutes."),
         ("ok", "The timer is set for {minutes} minutes.")),
    ),
    Tool(
        ("convert_currency", "exchange", "convert_money"),
        ("Convert money between currencies",),
        {"amount": Param(("amount", "value"), "number", "How much", _between(1, 999)),
         "from": Param(("from", "from_currency", "source"), "string", "Currency to convert",
                       _any(*CURRENCIES)),
         "to": Param(("to", "to_currency", "target"), "string", "Currency wanted",
                     _any(*CURRENCIES))},
        ("Convert {amount} {from} to {to}.", "How much is {amount} {from} in {to}?",
         "Change {amount} {from} into {to}."),
        (('{{"result": {i}}}', "{amount} {from} is {i} {to}."),
         ("{i}", "{amount} {from} is {i} {to}.")),
    ),
    Tool(
        ("translate", "translate_text", "translator"),
        ("Translate a text",),
        {"text": Param(("text", "text", "phrase"), "string", "The text", _text),
         "language": Param(("language", "target_language", "to"), "string", "Target language",
                           _any(*LANGUAGES))},
        ("Translate '{text}' into {language}.", "Translate \"{text}\" to {language}.",
         "How do you say '{text}' in {language}?"),
        (('{{"translation": "{t}"}}', "In {language}: {t}"), ("{t}", "In {language}: {t}")),
    ),
    Tool(
        ("set_light", "light_control", "change_light"),
        ("Set the colour of a light",),
        {"room": Param(("room", "room", "area"), "string", "The room", _any(*ROOMS)),
         "color": Param(("color", "colour"), "string", "The colour", _any(*COLOURS))},
        ("Make the {room} light {color}.", "Set the light in the {room} to {color}.",
         "Turn the {room} light {color}."),
        (('{{"status": "ok"}}', "The {room} light is now {color}."),
         ("done", "The {room} light is now {color}.")),
    ),
    Tool(
        ("create_event", "add_event", "schedule_meeting"),
        ("Add an event to the calendar",),
        {"title": Param(("title", "name", "event"), "string", "What it is",
                        _any("meeting", "lunch", "dinner", "call", "party", "exam", "concert")),
         "day": Param(("day", "date"), "string", "The day", _any(*DAYS)),
         "time": Param(("time", "hour"), "string", "The time",
                       lambda rng: f"{rng.randint(0, 23)}:{rng.choice(('00', '15', '30', '45'))}")},
        ("Add a {title} on {day} at {time}.", "Schedule a {title} for {day} at {time}.",
         "Put a {title} in my calendar on {day} at {time}."),
        (('{{"status": "created"}}', "The {title} is set for {day} at {time}."),
         ("created", "The {title} is set for {day} at {time}.")),
    ),
    Tool(
        ("get_stock_price", "stock_price", "quote"),
        ("Get the price of a stock",),
        {"symbol": Param(("symbol", "ticker"), "string", "Ticker symbol",
                         lambda rng: scrambled(rng, 3, 4).upper())},
        ("What is the price of {symbol}?", "Stock price of {symbol}?", "How is {symbol} doing?",
         "Give me the stock price of {symbol}."),
        (('{{"price": {i}}}', "{symbol} is at {i}."), ("{i}", "{symbol} is at {i}.")),
    ),
    Tool(
        ("play_music", "play_song", "player"),
        ("Play music",),
        {"song": Param(("song", "title", "track"), "string", "What to play",
                       lambda rng: f"{rng.choice(COLOURS)} {_noun(rng)}".title())},
        ("Play {song}.", "Play the song {song}.", "Put on {song}.", "I want to hear {song}."),
        (('{{"status": "playing"}}', "Now playing {song}."), ("playing", "Now playing {song}.")),
    ),
)  # fmt: skip

CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy")
