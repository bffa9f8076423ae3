"""Counts the official JSON Schema tests that each installed library accepts; writes the table.

    PYTHONPATH=. python benchmarks/grammar/coverage.py [--check]

By file of the suite (draft 2020-12), which is mostly a keyword: schemas accepted, of all.
`tests/contract/test_json_suite.py` checks that an accepted schema is enforced; this only counts.
The suite is downloaded once, as for the tests.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from page import put

from sylvan.runtime.features.grammar.libraries import installed_backends, library_version
from tests.support.json_suite import TIMEOUT_S, Compilers, load_suite

ROOT = Path(__file__).parents[2]


def table(cache: Path) -> str:
    suite = load_suite(cache)
    names = [name for name in installed_backends() if name != "combined"]
    of_all = Counter(case.file for case in suite.cases)
    accepted: dict[str, Counter[str]] = {}
    for name in names:
        compilers = Compilers(name, TIMEOUT_S.get(name, 30.0))
        try:
            grammars = compilers.compile(suite.cases)
        finally:
            compilers.close()
        made = zip(suite.cases, grammars, strict=True)
        accepted[name] = Counter(case.file for case, grammar in made if grammar is not None)
    rows = [
        f"| file | schemas | {' | '.join(map(library_version, names))} |",
        "|---" * (len(names) + 2) + "|",
        f"| all | {of_all.total()} | {' | '.join(str(accepted[n].total()) for n in names)} |",
    ]
    for file, count in sorted(of_all.items()):
        rows.append(f"| {file} | {count} | {' | '.join(str(accepted[n][file]) for n in names)} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="only report whether the page is out of date"
    )
    parser.add_argument("--cache", type=Path, default=ROOT / ".pytest_cache/d/json-schema-suite")
    options = parser.parse_args()
    return put("coverage", table(options.cache), check=options.check)


if __name__ == "__main__":
    sys.exit(main())
