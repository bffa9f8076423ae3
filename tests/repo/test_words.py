"""One word per concept: names, docstrings and comments use the field's terms."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.support.sources import SOURCES as ALL
from tests.support.sources import SourceFile, source_files

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
SOURCES = [path for path in ALL if not path.name.endswith("_pb2.py")]
NATIVE = sorted(p for p in (SRC / "sylvan/kernels").rglob("*") if p.suffix in {".h", ".cpp"})
# Names that stood where the field has a term. Word -> the term.
BANNED = {
    "Neutraliser": "ControlTokenEscaper",
    "Zygote": "a compile process",
    "Provers": "a compile pool",
    "Desk": "SamplerScratch",
    "Survey": "BlockStats",
    "SurveyRoom": "BlockStatsScratch",
    "Wish": "RowNeeds",
    "HOPELESS": "NO_VALID_TOKEN",
    "NOT_MADE": "FIM_UNSUPPORTED",
    "turn_natively": "use_native_rotary",
    "ModelFacts": "CheckpointInfo, LoadedModelInfo or ServedModelInfo",
    "Obstacle": "DeterminismBlocker",
    "tell_at": "emit_at",
    "tell_every": "emit_interval",
    "kept_back": "held back for review",
    "_make_way": "_preempt_for_urgent",
    "standins": "native_modules",
    "forgery": "control_tokens",
    "unforgeable": "safe_encoding",
    "rehearsal": "dry run",
    "whose were not fails alone": "clamp, so only that request fails",
    "Wishes": "MissingKVPolicy",
    "WritingAhead": "BatchDrafter",
    "GrpcAsking": "GrpcProbing",
    "EngineSteering": "EngineControl",
    "Reception": "TokenTimer",
    "CacheFollowing": "CacheFollower",
    "Steered": "CommandRunner",
    "Tokenising": "PromptTokenizer",
    "ReachError": "RemoteReadError",
    "_ToldRanks": "_RankRound",
    "_JobShown": "_RegistrationView",
}
# Phrases for which plain English has a shorter one. Regex -> what to write instead.
PHRASES = {
    r"seconds since 1970": "seconds since the Unix epoch, or Unix time",
    r"Whose (it|request it|they) (is|are)": "Tenant of ..., Owner of ...",
    r"Whom to\b": "Which workers, Which requests",
    r"[Nn]obody (is|can guess|knows|waits|reads|else|serves|wants)\b": "no client, unguessable",
    r"go(es)? on with\b": "continue(s)",
    r"go(es)? on from\b(?! a recurrent)": "continue(s)",
    r"[Ll]ikewise\b": "the same, or repeat the noun",
    r"beg[iu]ns? anew\b": "start over, restart",
    r"of late\b(?!r)": "recent",
    r"(no|a|gives?|shows?) signs? of life": "heartbeat, message",
    r"shows? life\b": "sends heartbeats",
    r"hand(s|ed)? over (the )?(KV|pages)": "transfer KV, send pages",
    r"how (it|they) fares?\b": "health",
    r"as far as it has come": "progress",
    r"(What|all) that is told\b": "report",
    r"is what it stands for": "name the noun",
    r"if that is asked for": "if enabled, if requested",
    r"Has (texts|tokens) (embedded|guessed)": "Embeds, Drafts",
    r"Takes in (outputs|requests|one)": "Receives",
    r"is none of ours": "is unknown, is invalid",
    r"that are so many\b": "say the number",
    r"The same,? less\b": "without",
    r"Bound on bodies\b": "Limit of bodies",
    r"for as long as somebody": "while it is used",
}
# Public classes that share a name on purpose. Name -> why.
SHARED_NAMES = {
    "AllBlocksCleared": "a message on the wire: what the runtime publishes, the gateway reads",
    "BlockRemoved": "as AllBlocksCleared",
    "BlockStored": "as AllBlocksCleared",
    "AllowedTools": "schemas of two public APIs, named by each",
    "Attention": "an op, whose name is that of its C++ struct, and the module",
    "LayerNorm": "an op and the module",
    "Linear": "an op and the module",
    "ShortConv": "an op and the module",
    "StateSlots": "operands of ops, and who owns the slots",
    "Xielu": "an op and the module",
}
# Methods that a library declares: PyTorch, logging, asyncio.Protocol, httptools.
CALLED_BY_LIBRARIES = {
    *("forward", "format"),
    *("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"),
    *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body"),
    "on_message_complete",
}


def test_public_functions_have_a_docstring_where_they_are_declared():
    """An implementation needs none: that of its interface holds."""
    documented = set(CALLED_BY_LIBRARIES)
    silent: dict[str, list[str]] = defaultdict(list)
    for file in files():
        for function in file.functions:
            if function.documented:
                documented.add(function.name)
            else:
                silent[function.name].append(f"{file.path.relative_to(SRC)}:{function.line}")
    missing = {name: places for name, places in silent.items() if name not in documented}
    assert missing == {}


def test_public_classes_have_a_name_of_their_own():
    places: dict[str, list[str]] = defaultdict(list)
    for file in files():
        for name in file.public_classes:
            places[name].append(str(file.path.relative_to(SRC)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in SHARED_NAMES} == {}
    assert set(SHARED_NAMES) - set(twice) == set(), "exceptions that nothing needs"


def test_words_that_were_removed_stay_away():
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, BANNED))})\b")
    found = [
        f"{path.relative_to(SRC)}:{number}: {match.group()}: say {BANNED[match.group()]}"
        for path in [*SOURCES, *NATIVE]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in pattern.finditer(line)
    ]
    assert found == []


def test_phrases_that_were_removed_stay_away():
    pattern = re.compile("|".join(f"(?:\\b{phrase})" for phrase in PHRASES))
    found = [
        f"{path.relative_to(SRC)}:{number}: {match.group()}: say {_advice(match.group())}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in pattern.finditer(line)
    ]
    assert found == []
    assert pattern.search("The worker shows life; another one begins anew.")


def files() -> list[SourceFile]:
    """Those that people wrote."""
    return [file for file in source_files() if not file.path.name.endswith("_pb2.py")]


def _advice(phrase: str) -> str:
    return next(advice for known, advice in PHRASES.items() if re.match(known, phrase))
