"""Write the generated parts of docs/: `python scripts/generate_docs.py [--check]`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import diagrams
import messages
import reference_pages

from sylvan.cli import sglang_page
from sylvan.cli.help import bench_markdown, markdown, route_markdown, simulate_markdown
from sylvan.runtime.server import reference

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SETTINGS = ROOT / "docs" / "reference" / "config.md"
ROUTE_SETTINGS = ROOT / "docs" / "reference" / "route.md"
BENCH_SETTINGS = ROOT / "docs" / "reference" / "bench.md"
SIMULATE_SETTINGS = ROOT / "docs" / "reference" / "simulate.md"
ROUTES = ROOT / "docs" / "reference" / "http.md"
BEGIN, END = "<!-- packages: generated -->\n", "<!-- /packages -->\n"
FLAGS = ROOT / "docs" / "reference" / "sglang-flags.md"
LEVELS = 3  # sylvan, sylvan.x, sylvan.runtime.x


def packages() -> str:
    """The package table, from the first sentence of each package's docstring."""
    rows = ["| package | what |", "|---|---|"]
    for init in sorted((ROOT / "src" / "sylvan").rglob("__init__.py")):
        parts = init.parent.relative_to(ROOT / "src").parts
        if len(parts) > LEVELS or (len(parts) == LEVELS and parts[1] != "runtime"):
            continue
        doc = ast.get_docstring(ast.parse(init.read_text())) or ""
        rows.append(f"| `{'.'.join(parts)}` | {' '.join(doc.split(chr(10) * 2)[0].split())} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Rewrite the pages; with --check, only report pages that are out of date."""
    text = PAGE.read_text()
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    pages = {PAGE: text[:start] + packages() + text[stop:], SETTINGS: markdown()}
    pages[ROUTES] = reference.markdown()
    pages[FLAGS] = sglang_page.markdown()
    pages[ROUTE_SETTINGS] = route_markdown()
    pages[BENCH_SETTINGS] = bench_markdown()
    pages[SIMULATE_SETTINGS] = simulate_markdown()
    folder = ROOT / "docs" / "reference"
    pages[folder / "engine.md"] = reference_pages.engine()
    pages[folder / "cli.md"] = reference_pages.commands()
    pages[folder / "metrics.md"] = reference_pages.metrics()
    pages[folder / "chips.md"] = reference_pages.chips()
    pages[folder / "kernels.md"] = reference_pages.kernels()
    pages[folder / "errors.md"] = messages.page()
    pages[ROOT / "docs" / "not-here.md"] = reference_pages.absent()
    for name, drawing in diagrams.DIAGRAMS.items():
        pages[ROOT / "docs" / "concepts" / f"{name}.svg"] = drawing()
    stale = [p for p, wanted in pages.items() if not p.exists() or p.read_text() != wanted]
    if "--check" in sys.argv:
        for page in stale:
            sys.stderr.write(f"{page.name} is out of date: run `make docs`\n")
        return int(bool(stale))
    for page in stale:
        page.parent.mkdir(exist_ok=True)
        page.write_text(pages[page])
    return 0


if __name__ == "__main__":
    sys.exit(main())
