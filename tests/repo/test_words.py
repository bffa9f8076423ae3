"""One word per concept: names, docstrings and comments use the field's terms."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.sources import SourceFile, source_files

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
DOCS = ROOT / "docs"
FOLDERS = ("src", "tests", "benchmarks", "tools", "scripts", "examples")
SOURCES = sorted(p for p in SRC.rglob("*.py") if not p.name.endswith("_pb2.py"))
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
    "AsyncCentre": "AsyncHub",
    "Spoke": "HubPeer",
    "on_hold": "on_stall",
    "inflicted": "injected",
    "Victims": "EvictionOrder",
    "_Shelf": "_TierHeap",
    "_shed": "_shrink_tier",
    "_distrusted": "_invalidated",
    "found_in": "cached_in",
    "apart_by": "namespace",
    "_is_apart": "_constrain_disjoint",
    "primed": "await_first_chunk",
    "unless_gone": "cancel_on_disconnect",
    "HOLE": "PLACEHOLDER",
    "plain_frame": "text_template",
    "LateTexts": "LateInteractionConfig",
    "late_vectors": "late_interaction_vectors",
    "Judged": "ScoredDocument",
    "demand_texts": "reject_step_rewards",
    "Breach": "Violation",
    "TreeGuesser": "TreeDrafter",
    "Guesser": "Drafter",
    "guesses": "draft tokens",
    "FIRST_GUESS": "INITIAL_RATE",
    "HELD_UP": "DISTURBED",
    "WON_SHARE": "SAVED_TIME_SHARE",
    "in_vain": "futile",
    "HOPE": "BEST_CASE_FACTOR",
    "give_way": "lower_priority",
    "VectorsWorker": "HiddenStatesWorker",
    "SURER": "MIN_SHARE_GAIN",
    "DEEPER": "DEPTH_DECAY",
    "begin_as": "init_from_model",
    "MOST_GUESSED": "DEFAULT_DRAFT_VOCAB",
    "LoraServing": "LoraAdapters",
    "served_facts": "served_model_info",
    "CacheFollowing": "CacheFollower",
    "Steered": "CommandRunner",
    "Tokenising": "PromptTokenizer",
    "ReachError": "RemoteReadError",
    "_ToldRanks": "_RankRound",
    "_JobShown": "_RegistrationView",
    "told_by_modelopt": "with_quantization_config",
    "settle_tree": "record_tree",
    "_told_apart": "_properties_disjoint",
    "TOLD_EVERY": "PROGRESS_EVERY",
    "fold_block": "softmax_update_block",
    "PoolingWish": "PoolingOverride",
    "TurningAttention": "RotaryAttention",
    "turning": "rope_dim, rotary",
    "shares_TK": "weights_TK",
    "Seat": "GroupMember",
    "_Way": "_PairRoutes",
    "room_bytes": "buffer_bytes",
    "Drawing": "PendingSample",
    "Carried": "FinishedCommand",
    "ModelSite": "ModelContext",
    "Occupation": "ReleasableMemory",
    "PagesAhead": "PagePrefaulter",
    "ReleasedAhead": "PrefaultedMemory",
    "LateWrites": "BackgroundWrites",
    "LateParts": "DeferredParts",
    "LateSender": "DelayedSender",
    "LateReceiver": "DelayedReceiver",
    "KeptWeights": "PackedWeightFile",
    "KeptAnswer": "StoredAnswer",
    "Learnt": "TrainingProgress",
    "LookError": "DiscoveryError",
    "since_1970": "unix_time",
    "hopeless": "no_valid_token",
    "hurries": "wants_step_soon",
    "won_s": "saved_s",
    "go_beside": "run_in_background",
    "both_ways": "bidirectional",
    "weighed": "weighted",
    "NoRanks": "UnconnectedRank",
    "barred": "banned",
    "MAX_SINKING": "MAX_DEMOTIONS",
    "obstacle": "determinism_blocker, unusable_reason",
    "same_bits_obstacles": "same_bits_blockers",
    "instead_of": "alternative_to",
    "FOREIGN": "SGLANG_VALUES",
    "placed_as": "routing_request",
    "see_health": "record_health",
    "see_peer": "record_peer_load",
    "see_foreign": "record_foreign_load",
    "at_hand": "get_loaded",
    "PassParts": "PassThroughParts",
    "respelt": "with_client_field",
    "first_fault": "first_error",
    "forge_ok": "allow_control_tokens",
    "may_forge": "spells_control_token",
    "UnforgeableEncoder": "SafeEncoder",
    "ApartImages": "DualEncoderImages",
    "FixedImages": "FixedSizeImages",
    "as_torchrun_says": "with_torchrun_settings",
    "given_socket": "inherited_socket",
    "fronted": "serve_gateway",
    "goes_on": "continues",
    "go_on": "continue",
    "OwnRows": "LocalRows",
    "OwnRequests": "LocalRequests",
    "OwnPagesWorker": "LocalPagesWorker",
    "own_requests": "local_requests",
    "CrossWatch": "CrossAttentionRecorder",
    "ShortSums": "SymmetricAllReduce",
    "short_sums": "symmetric_all_reduce",
    "measure_piece": "measure_block",
    "keep_most": "select_largest",
    "as_it_is": "keeps_non_finite",
    "BINS_OF_POWER": "BINS_PER_OCTAVE",
    "turn_query": "rotate_query",
    "soften": "softmax_weights",
    "HeldStates": "StateParts",
    "point_bucket": "set_bucket_views",
    "with_pages_beside": "with_mirrored_pages",
    "_stands_for": "_wrapped",
    "CountsRows": "HasExpertLoad",
    "ChoosesExperts": "RoutedProjection",
    "ChosenHeads": "RoutedHeads",
    "DividedFiles": "SplitStacks",
    "ModelSource": "TransformersClasses",
    "find_source": "find_classes",
    "usual_slopes": "default_slopes",
    "WordHead": "MaskedLMHead",
    "reads_words": "pools_logits",
    "HybridPlace": "ZambaHybridLayer",
    "makes_numbers": "generates_random",
    "NativeCalls": "NativeTensorAttention",
    "most_samples": "max_sampled_rows",
    "most_chosen": "experts_per_row",
}
# Limits that say most or least instead of max or min; files of simulations have some.
LIMITS = re.compile(r"\b_?(?:most|least|MOST|LEAST)_(?!common|likely|urgent|recent)\w+")
# Phrases for which plain English has a shorter one. Regex -> what to write instead.
PHRASES = {
    r"seconds since 1970": "seconds since the Unix epoch, or Unix time",
    r"Whose (it|request it|they) (is|are)": "Tenant of ..., Owner of ...",
    r"Whom to\b": "Which workers, Which requests",
    r"[Nn]obody (is|can guess|knows|waits|reads|else|serves|wants)\b": "no client, unguessable",
    r"[Ll]ikewise\b": "the same, or repeat the noun",
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
    r"(?<!here )is no (file|JSON|integer|object|list|id|address|http|page|tokenizer)\b": "is not a",
}
# These hold for tests, benchmarks, tools and pages, too.
EVERYWHERE = {
    r"anew\b": "again, from scratch, or restart",
    r"as ever\b": "as usual, or nothing",
    r"(goes|go|going|went) on (by|from|with|until|elsewhere|behind|past)\b": "continue(s)",
    r"told (apart|of|so)\b": "distinguished, reported, notified",
    r"beside (the )?steps\b": "concurrently with steps",
    r"[Ww]hat is \w+ed of\b": "name the noun",
    r"[Ww]hat (becomes|became|came|comes) of\b": "result, outcome",
    r"none of (ours|yours)\b": "unknown",
    r"\w+ that nobody \w+": "unused, unread, unwatched",
    r"the same weather": "load on the machine",
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
    for file in _written_files():
        for function in file.functions:
            if function.documented:
                documented.add(function.name)
            else:
                silent[function.name].append(f"{file.name}:{function.line}")
    missing = {name: places for name, places in silent.items() if name not in documented}
    assert missing == {}


def test_public_classes_have_a_name_of_their_own():
    places: dict[str, list[str]] = defaultdict(list)
    for file in _written_files():
        for name in file.public_classes:
            places[name].append(file.name)
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


def test_limits_are_named_max_and_min():
    paths = [*SOURCES, *NATIVE]
    assert [f"{p}: {name}" for p in paths for name in LIMITS.findall(p.read_text())] == []


def test_phrases_that_were_removed_stay_away():
    assert _phrases(SOURCES, PHRASES | EVERYWHERE) == []
    pages = [*ROOT.glob("*.md"), *(p for p in DOCS.rglob("*.md") if p.parent.name != "reference")]
    others = [p for p in (*_python(*FOLDERS[1:]), *pages) if p != Path(__file__)]
    assert _phrases(others, EVERYWHERE) == []


def test_phrases_are_found(tmp_path):
    text = tmp_path / "text.md"
    text.write_text("The worker shows life.\nAnother one begins anew, as ever.")
    found = _phrases([text], PHRASES | EVERYWHERE)
    assert [line.split(": ")[2] for line in found] == [
        "say sends heartbeats",
        "say again, from scratch, or restart",
        "say as usual, or nothing",
    ]


def test_docstrings_begin_with_what_a_thing_is_or_does():
    """They begin with the noun or the verb, not with What, Whose or Nobody."""
    riddle = re.compile(
        r"^\s*r?\"\"\"(What|Whatever|Whose|Whom|Nobody|Neither|None of)\b.*", re.MULTILINE
    )
    found = [
        f"{path.relative_to(ROOT)}: {match.group().strip()[:60]}"
        for path in _python(*FOLDERS)
        for match in riddle.finditer(path.read_text())
    ]
    assert found == []


def _written_files() -> list[SourceFile]:
    """The package's files without generated ones."""
    return [file for file in source_files() if not file.name.endswith("_pb2.py")]


def _python(*folders: str) -> list[Path]:
    files = (p for folder in folders for p in (ROOT / folder).rglob("*.py"))
    return sorted(p for p in files if not p.name.endswith("_pb2.py"))


def _phrases(paths: Iterable[Path], phrases: Mapping[str, str]) -> list[str]:
    pattern = re.compile("|".join(f"(?:\\b{phrase})" for phrase in phrases))
    return [
        f"{path}:{number}: {match.group()}: say {_advice(match.group(), phrases)}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in pattern.finditer(line)
    ]


def _advice(phrase: str, phrases: Mapping[str, str]) -> str:
    return next(advice for known, advice in phrases.items() if re.match(known, phrase))
