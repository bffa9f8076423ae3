"""Write what `run.py` measured into docs/performance-gpu.md.

    python benchmarks/gpu/page.py gpu.json
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "performance-gpu.md"
BEGIN, END = "<!-- measured: written by benchmarks/gpu/page.py -->\n", "<!-- /measured -->\n"


def table(report: dict[str, Any]) -> str:
    """A table for each section, in the order in which they were measured first."""
    parts = [f"{report['device']}.\n"]
    order = list(dict.fromkeys(row["section"] for row in report["rows"]))
    rows = sorted(report["rows"], key=lambda row: order.index(row["section"]))
    for section, some in groupby(rows, key=lambda row: row["section"]):
        lines = [_line(row) for row in some]
        head = f"| {section} | | floor | share | |\n|---|---:|---:|---:|---|"
        parts.append("\n".join((head, *lines)) + "\n")
    if report["skipped"]:
        parts.append("Skipped:\n\n" + "\n".join(f"- {name}" for name in report["skipped"]) + "\n")
    return "\n".join(parts)


def _line(row: dict[str, Any]) -> str:
    floor = "" if row["floor"] is None else f"{row['floor']:.4g}"
    share = "" if row["share"] is None else f"{100 * row['share']:.0f} %"
    return f"| {row['what']} | {row['value']:.4g} {row['unit']} | {floor} | {share} | {row['note']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    report = json.loads(parser.parse_args().report.read_text())
    page = PAGE.read_text()
    start, stop = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(page[:start] + "\n" + table(report) + "\n" + page[stop:])


if __name__ == "__main__":
    main()
