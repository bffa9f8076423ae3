"""Writes generated tables into a page of the documentation."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "grammar.md"


def put(name: str, table: str, *, check: bool) -> int:
    """Write `table` between the markers of that name; with `check`, only return 1 if it differs."""
    begin, end = f"<!-- {name}: generated -->\n", f"<!-- /{name} -->\n"
    page = PAGE.read_text()
    start, stop = page.index(begin) + len(begin), page.index(end)
    wanted = page[:start] + table + page[stop:]
    if check:
        return int(page != wanted)
    PAGE.write_text(wanted)
    return 0
