"""Impossible combinations with speculative decoding."""

from __future__ import annotations

from sylvan.config.fields import nearest
from sylvan.config.rules import Rule, RuleCase
from sylvan.config.tree import DRAFT_HEADS, OWN_HEAD, SpeculativeConfig

ALGORITHMS = ("ngram", "standalone", *DRAFT_HEADS, OWN_HEAD)
"""Known speculation algorithms."""
MAX_WIDE, MAX_TREE = 16, 64
"""Largest number of draft tokens per position, and of tokens in a draft tree."""
PLANNED_ALGORITHMS = ("dflash", "dspark", "uno")


def _drafts(case: RuleCase) -> SpeculativeConfig:
    """The section; without one, a section that violates no rule."""
    none = SpeculativeConfig(algorithm=ALGORITHMS[0], num_steps=1, topk=1, num_draft_tokens=2)
    return case.config.speculative or none


def _what_drafts(case: RuleCase) -> str:
    """Requirement for `speculative.draft_model`."""
    return "draft head" if _drafts(case).algorithm in DRAFT_HEADS else "smaller model"


def _draft_ids(case: RuleCase) -> int:
    """Vocabulary size of the draft model."""
    return case.facts.draft.vocab_size if case.facts.draft else 0


def _unknown_algorithm(case: RuleCase) -> str:
    given = _drafts(case).algorithm
    known = f"there is {', '.join(ALGORITHMS)}"
    about = "not supported yet" if given in PLANNED_ALGORITHMS else "unknown"
    return f"{{speculative.algorithm}}: {about}{nearest(given, ALGORITHMS)}; {known}"


def _number(value: int | str | None) -> int:
    """A resolved number."""
    return value if isinstance(value, int) else 0


def _wide(case: RuleCase) -> bool:
    """Whether drafts are trees."""
    return _drafts(case).topk != 1


SPECULATIVE_RULES = (
    Rule(
        "unknown speculative algorithm",
        ("speculative.algorithm",),
        lambda c: _drafts(c).algorithm not in ALGORITHMS,
        _unknown_algorithm,
    ),
    Rule(
        "draft model that the algorithm does not use",
        ("speculative.algorithm", "speculative.draft_model"),
        lambda c: _drafts(c).algorithm == OWN_HEAD and _drafts(c).draft_model is not None,
        "{speculative.algorithm} has no model; leave {speculative.draft_model} out",
    ),
    Rule(
        "no draft model",
        ("speculative.algorithm", "speculative.draft_model"),
        lambda c: (
            _drafts(c).algorithm in ("standalone", *DRAFT_HEADS) and _drafts(c).draft_model is None
        ),
        lambda c: (
            f"{{speculative.algorithm}} needs a {_what_drafts(c)}; set it with "
            "speculative.draft_model"
        ),
    ),
    Rule(
        "draft model with another vocabulary",
        ("speculative.draft_model", "model"),
        lambda c: c.facts.draft is not None and not c.facts.draft_reads_alike,
        lambda c: (
            f"{{speculative.draft_model}} was made for {_draft_ids(c)} tokens, {{model}} has "
            f"{c.facts.model.vocab_size}; choose a head that was trained for this model"
            if _drafts(c).algorithm in DRAFT_HEADS
            else "{speculative.draft_model}: its tokenizer differs from that of {model}, so "
            "its ids mean other texts; choose a model of the same family"
        ),
    ),
    Rule(
        "draft model that does not generate text",
        ("speculative.draft_model",),
        lambda c: (
            c.facts.draft is not None
            and _drafts(c).algorithm == "standalone"
            and (not c.facts.draft.causal or "generate" not in c.facts.draft.tasks)
        ),
        "{speculative.draft_model} does not generate text; choose a generative model",
    ),
    Rule(
        "draft model with recurrent layers",
        ("speculative.draft_model",),
        lambda c: c.facts.draft is not None and c.facts.draft.state_numbers > 0,
        "{speculative.draft_model} has recurrent layers, whose state cannot be rolled back after "
        "rejected drafts; choose a model without recurrent layers",
    ),
    Rule(
        "draft trees without a head",
        ("speculative.topk", "speculative.algorithm"),
        lambda c: _wide(c) and _drafts(c).algorithm not in (*DRAFT_HEADS, OWN_HEAD),
        "{speculative.topk}: {speculative.algorithm} drafts one continuation; heads draft trees "
        "(eagle, eagle3, medusa, nextn); leave it at auto",
    ),
    Rule(
        "tree too large",
        ("speculative.topk", "speculative.num_draft_tokens"),
        lambda c: (
            _wide(c)
            and (
                _number(_drafts(c).topk) > MAX_WIDE
                or _number(_drafts(c).num_draft_tokens) > MAX_TREE
            )
        ),
        "{speculative.topk} and {speculative.num_draft_tokens}: trees have at most "
        f"{MAX_WIDE} draft tokens per position and {MAX_TREE} in all",
    ),
    Rule(
        "draft tree with too few tokens for its depth",
        ("speculative.num_draft_tokens", "speculative.num_steps"),
        lambda c: (
            _wide(c) and _number(_drafts(c).num_draft_tokens) <= _number(_drafts(c).num_steps)
        ),
        "{speculative.num_draft_tokens} must be more than {speculative.num_steps}, the depth of "
        "the tree; leave one of them at auto",
    ),
    Rule(
        "num_steps and num_draft_tokens differ",
        ("speculative.num_draft_tokens", "speculative.num_steps"),
        lambda c: not _wide(c) and _drafts(c).num_draft_tokens != _number(_drafts(c).num_steps) + 1,
        "{speculative.num_draft_tokens} must be one more than {speculative.num_steps}, the newest "
        "token and the drafts after it; leave one of them at auto",
    ),
    Rule(
        "texts without use",
        ("speculative.corpus", "speculative.shared_tokens", "speculative.algorithm"),
        lambda c: (
            _drafts(c).algorithm != "ngram"
            and (_drafts(c).corpus is not None or _drafts(c).shared_tokens > 0)
        ),
        "{speculative.algorithm} searches no texts; leave {speculative.corpus} and "
        "{speculative.shared_tokens} out",
    ),
    Rule(
        "min_match above max_match",
        ("speculative.min_match", "speculative.max_match"),
        lambda c: _drafts(c).min_match > _drafts(c).max_match,
        "{speculative.min_match} is more than {speculative.max_match}; leave one of them out",
    ),
    Rule(
        "speculation not on this device",
        ("speculative.algorithm", "device"),
        lambda c: (
            c.config.speculative is not None
            and c.config.device != "cpu"
            and _drafts(c).algorithm != "ngram"
        ),
        "{speculative.algorithm}: steps on {device} verify only ngram drafts; choose ngram, or "
        "leave it out",
    ),
    Rule(
        "speculation with tensor-parallel GPUs",
        ("speculative.algorithm", "device", "parallel.tp"),
        lambda c: (
            c.config.speculative is not None
            and c.config.device != "cpu"
            and c.config.parallel.tp > 1
        ),
        "{speculative.algorithm}: ranks on {device} verify no drafts; lower {parallel.tp} to 1, "
        "or leave it out",
    ),
    Rule(
        "speculation for a task without generation",
        ("speculative.algorithm", "task"),
        lambda c: c.config.speculative is not None and c.config.task in ("embed", "classify"),
        "{speculative.algorithm}: {task} generates nothing; leave it out",
    ),
    Rule(
        "speculation with overlapped scheduling",
        ("speculative.algorithm", "scheduler.overlap"),
        lambda c: c.config.speculative is not None and c.config.scheduler.overlap == "on",
        "{speculative.algorithm} drafts from the newest token, which is not known yet "
        "with {scheduler.overlap}; leave scheduler.overlap at auto",
    ),
)
