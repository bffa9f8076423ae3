"""Hooks of the documentation site; `mkdocs.yml` names this file.

CHANGELOG.md and CONTRIBUTING.md become pages. Links to other files outside docs/ become their path
as code, because there is no public repository to link to. Diagrams are inlined, so that they follow
the page's colours.
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
    """Add the pages that are beside docs/."""
    for source, page in EXTRA_PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=from_root(text)))  # type: ignore[arg-type]
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Rewrite links that leave docs/, and inline diagrams."""
    if page.file.src_uri in EXTRA_PAGES.values():
        return markdown  # see `on_files`
    folder = (ROOT / "docs" / page.file.src_uri).parent
    return inline_diagrams(stay_inside(markdown, folder), folder)


def from_root(text: str) -> str:
    """Convert a text of the repository's root to a page in docs/."""
    docs = ROOT / "docs"
    return _LINK.sub(lambda found: _link(found, ROOT, docs), text)


def stay_inside(markdown: str, folder: Path) -> str:
    """Rewrite links to files outside docs/: to their page if they have one, else as code.

    Args:
        markdown: A page.
        folder: Folder of the page.
    """
    return _LINK.sub(lambda found: _link(found, folder, folder), markdown)


def _link(found: re.Match[str], source: Path, page: Path) -> str:
    """Rewrite a link of a file in the folder `source` for a page in the folder `page`."""
    text, target, anchor = found.groups()
    path, docs = Path(os.path.normpath(source / target)), ROOT / "docs"
    if not path.is_relative_to(ROOT) or not path.exists():
        return found[0]
    name = str(path.relative_to(ROOT))
    inside = docs / EXTRA_PAGES[name] if name in EXTRA_PAGES else path
    if inside.is_relative_to(docs):
        return f"[{text}]({os.path.relpath(inside, page)}{anchor or ''})"
    return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}`)"


def inline_diagrams(markdown: str, folder: Path) -> str:
    """Replace links to SVG files by their content, which the site's style sheet colours."""

    def inline(found: re.Match[str]) -> str:
        svg = _STYLE.sub("", (folder / found[2]).read_text())
        return f'<figure class="diagram">\n{svg.strip()}\n</figure>'

    return _DIAGRAM.sub(inline, markdown)
