"""Greetings, questions about the model, thanks, goodbyes, and polite refusals."""

from __future__ import annotations

import random

from tools.train.data.base import Example, assistant, casual, key_of, made_up, maybe_system, user
from tools.train.data.words import ADJECTIVES, CITIES, FOODS, JOBS, NAMES, NOUNS, VERBS

ABILITIES = (
    "I can add and subtract, name capitals, copy, reverse and sort short lists, "
    "extract JSON, call tools and remember your name."
)
REFUSAL = (
    "Sorry, I can only do small things: sums, capitals, short lists, JSON, tool calls "
    "and small talk."
)

_INTENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "greet": (
        "Hello! How can I help you?",
        ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Good afternoon", "Hi there",
         "Hello there", "Hey there", "Greetings", "Howdy", "Hello sapling", "Hi sapling",
         "Good day", "Hello world", "Hello, world"),
    ),
    "who": (
        "I am sapling, the small model that ships with Sylvan.",
        ("Who are you?", "What are you?", "What is your name?", "What's your name?",
         "Tell me who you are.", "Introduce yourself.", "Which model are you?",
         "What model is this?", "What should I call you?", "Who am I talking to?",
         "Are you a robot?", "Are you an AI?", "Tell me about yourself.", "What model are you?",
         "Do you have a name?", "Who is this?"),
    ),
    "maker": (
        "I was trained from scratch for Sylvan, the server that runs me.",
        ("Who made you?", "Who created you?", "Who built you?", "Where do you come from?",
         "Who trained you?", "How were you made?", "Who is your maker?", "Who developed you?"),
    ),
    "sylvan": (
        "Sylvan is the LLM server that runs me.",
        ("What is Sylvan?", "Tell me about Sylvan.", "What does Sylvan do?", "What's Sylvan?",
         "Explain Sylvan.", "Who is Sylvan?"),
    ),
    "able": (
        ABILITIES,
        ("What can you do?", "How can you help me?", "What are you good at?",
         "What are your skills?", "Help", "What do you know?", "Can you help me?",
         "What can I ask you?", "Tell me what you can do.", "What are you able to do?",
         "List your abilities.", "What things can you do?"),
    ),
    "how": (
        "I am fine, thank you! How can I help you?",
        ("How are you?", "How are you doing?", "How do you do?", "How is it going?",
         "How's it going?", "How are you today?", "Are you ok?", "How do you feel?",
         "What's up?"),
    ),
    "thanks": (
        "You are welcome!",
        ("Thanks", "Thank you", "Thanks a lot", "Thank you very much", "Many thanks",
         "Great, thanks",
         "Thanks for your help", "Thank you so much", "Perfect, thank you", "Cheers, thanks"),
    ),
    "bye": (
        "Goodbye! Have a nice day.",
        ("Bye", "Goodbye", "See you", "See you later", "Good night", "Bye bye", "I have to go",
         "See you tomorrow", "Take care", "Farewell", "Have a nice day"),
    ),
    "praise": (
        "Thank you, that is kind!",
        ("Well done", "Good job", "You are great", "Nice work", "I like you", "You are clever",
         "That was good", "Good answer"),
    ),
    "joke": (
        "Why did the tree sit down? It was bushed.",
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny.",
         "Tell a joke.", "Joke please", "Another joke"),
    ),
}  # fmt: skip

_PREFIXES = ("", "", "", "", "Hey, ", "Hi! ", "Ok, ", "So, ", "Well, ", "Hello! ", "Hello, ",
             "Hi, ", "Hi there! ", "Good morning! ", "Hello. ", "Hey! ")  # fmt: skip
_SUFFIXES = ("", "", "!", ".", " :)", " my friend", ", please", " now", " today", "!!")

_TOPICS = (
    "the weather on {c}", "the history of {c}", "quantum physics", "the meaning of life",
    "black holes", "a {a} {n}", "the {n} and the {o}", "love", "politics", "football",
    "{p}'s {n}", "how to build a {n}", "machine learning", "the stock market", "dreams",
    "philosophy", "dinosaurs", "the Roman empire", "{f}", "life as a {j}", "music", "poetry",
    "a {n} that {v} a {o}", "climate change", "the universe", "{m}",
)  # fmt: skip

_ASKS = (
    "Write a poem about {t}.", "Write a story about {t}.", "Tell me a story about {t}.",
    "Explain {t}.", "Explain {t} in simple words.", "Write an essay about {t}.",
    "What do you think about {t}?", "Why is {t} important?", "Write a song about {t}.",
    "Give me a summary of {t}.", "Tell me about {t}.", "Tell me something about {t}.",
    "How does {t} work?", "Write code for {t}.", "Write a Python program about {t}.",
    "Who invented {t}?", "Can you draw {t}?", "Discuss {t}.", "Write a haiku about {t}.",
    "What is the best {n} in {c}?", "How do I cook {f}?", "Where can I buy a {n}?",
    "Should I become a {j}?", "Why does the {n} {w} the {o}?", "Who is {p}?",
    "Translate this book into French.", "Predict the future of {t}.", "How tall is {p}?",
    "When was {p} born?", "Book a flight to {c}.", "Is {t} good or bad?", "{m} {m} {n} {m}?",
    "What does {m} mean?", "{m}", "{m} {m}", "Tell me a story.", "Write a poem.",
    "Give me advice about {t}.", "Describe {t}.", "Compare {n} and {o}.", "Do you like {t}?",
    "Write a letter to {p}.", "Solve the equation of {t}.", "The {a} {n} {v} the {o}.",
    "Who won the game in {c}?", "What happened in {c} yesterday?", "Once upon a time",
    "How far is {c} from here?", "Play {t}.", "Write a function that sorts a {n}.",
)  # fmt: skip


def smalltalk(rng: random.Random) -> Example:
    """Draw small talk; each intent has one fixed answer."""
    intent = rng.choice(list(_INTENTS))
    reply, phrases = _INTENTS[intent]
    phrase = rng.choice(phrases)
    text = phrase
    prefix = suffix = ""
    if intent not in ("greet", "thanks", "bye", "praise"):
        prefix = rng.choice(_PREFIXES)
        suffix = rng.choice(_SUFFIXES)
        if prefix:
            follows = prefix[-2] in "!." and rng.random() < 0.6  # "Hello! Who", else "Hello, who"
            text = prefix + (text if follows else text[:1].lower() + text[1:])
        if suffix:
            mark = text[-1] if text[-1] in "?." and suffix[0] == " " else ""
            text = (text.rstrip("?.") if suffix[0] in "!., " else text) + suffix + mark
    else:
        suffix = rng.choice(_SUFFIXES)
        text += suffix
    style = rng.random()
    if style < 0.2:
        text = text.lower()
    elif style < 0.35:
        text = text.lower().rstrip("?.!")
    key = key_of("talk", intent, phrase, prefix, suffix)
    return Example("smalltalk", [*maybe_system(rng), user(text), assistant(reply)], (key,))


def unknown(rng: random.Random) -> Example:
    """Draw a request that the model cannot meet, and its short polite refusal."""
    slots = {
        "a": rng.choice(ADJECTIVES), "n": rng.choice(NOUNS), "o": rng.choice(NOUNS),
        "p": rng.choice(NAMES), "c": rng.choice(CITIES), "f": rng.choice(FOODS),
        "j": rng.choice(JOBS), "v": rng.choice(VERBS), "w": rng.choice(VERBS).rstrip("s"),
        "m": made_up(rng, capital=False),
    }  # fmt: skip
    slots["t"] = rng.choice(_TOPICS).format(**slots)
    text = rng.choice(_ASKS).format(**slots)
    if rng.random() < 0.05:
        text = " ".join(rng.choice(NOUNS + VERBS) for _ in range(rng.randint(2, 7)))
    key = key_of("unknown", text)
    text = casual(rng, text)
    return Example("unknown", [*maybe_system(rng), user(text), assistant(REFUSAL)], (key,))
