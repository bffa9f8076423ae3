"""`sylvan bench compare`: compares two load test results."""

from __future__ import annotations

from sylvan.bench.compare import compare
from sylvan.bench.results import read_all
from sylvan.bench.table import comparison
from sylvan.cli.main import DONE, Spec
from sylvan.config.flags import Option, Parsed
from sylvan.protocol.errors import ConfigError

SPEC = Spec(
    usage="bench compare A.jsonl B.jsonl [--tag-a NAME] [--tag-b NAME]",
    doc="Compare two files of `sylvan bench serve --output FILE --output-details`: each figure, "
    "the ratio B / A and its bounds with 95 % confidence, from resampled requests. A star marks "
    "ratios whose bounds exclude 1. Runs in one file are combined; rates need several.",
    options=(
        Option("tag_a", "Take only runs of A with this tag.", metavar="NAME"),
        Option("tag_b", "Take only runs of B with this tag.", metavar="NAME"),
    ),
    tree=None,
    max_positions=2,
)


def run(args: Parsed) -> int:
    match args.positions:
        case [first, second]:
            a = read_all(first, args.options.get("tag_a"))
            b = read_all(second, args.options.get("tag_b"))
        case _:
            raise ConfigError(f"usage: sylvan {SPEC.usage}")
    print(comparison(compare(a, b)))
    return DONE
