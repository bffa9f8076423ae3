"""What the documentation site needs beyond MkDocs: `mkdocs.yml` names this file.

CHANGELOG.md and CONTRIBUTING.md become pages. Links to other files outside docs/ become their path
as code, since there is no public repository to link to. Diagrams are put into the page, so that
they follow its colours.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
EXTRA_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^):#\s]+)(#[^)\s]*)?\)")
_DIAGRAM = re.compile(r"!\[([^\]]*)\]\(([^)\s]+\.svg)\)")
_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)


def on_files(files: Files, config: Mapping[str, Any]) -> Files:
    """Add the pages that lie beside docs/."""
    for source, page in EXTRA_PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=from_root(text)))  # type: ignore[arg-type]
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Rewrite links that leave docs/, and inline diagrams."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    return inline_diagrams(stay_inside(markdown, folder), folder)


def from_root(text: str) -> str:
    """A text of the repository's root as a page in docs/."""
    return _LINK.sub(lambda m: m[0].replace("](docs/", "]("), text)


def stay_inside(markdown: str, folder: Path) -> str:
    """Links to files outside docs/: to their page where they have one, else their path as code.

    Args:
        markdown: A page.
        folder: Where the page lies.
    """

    def fix(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        path = Path(os.path.normpath(folder / target))
        docs = ROOT / "docs"
        if path.is_relative_to(docs) or not path.is_relative_to(ROOT):
            return found[0]
        name = str(path.relative_to(ROOT))
        if page := EXTRA_PAGES.get(name):
            return f"[{text}]({os.path.relpath(docs / page, folder)}{anchor or ''})"
        return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}`)"

    return _LINK.sub(fix, markdown)


def inline_diagrams(markdown: str, folder: Path) -> str:
    """Put SVG files in place of links to them; the site's style sheet colours them."""

    def inline(found: re.Match[str]) -> str:
        svg = _STYLE.sub("", (folder / found[2]).read_text())
        return f'<figure class="diagram">\n{svg.strip()}\n</figure>'

    return _DIAGRAM.sub(inline, markdown)
