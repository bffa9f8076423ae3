"""Pages of docs/ against the code they speak of."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from sylvan.cli.help import shown_sections
from sylvan.cli.main import COMMANDS
from sylvan.config.flags import parse_flags
from sylvan.config.schema import BENCH, ROUTE, SERVE, SIMULATE
from sylvan.protocol.errors import ConfigError
from tests.support.sources import ELLIPSIS, source_files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@cache
def sources():
    """Every text in the sources, with `…` for what is put into it; and the names of classes."""
    texts = [text for file in source_files() for text in file.texts]
    return "\0".join([*texts, ""]), {kind for file in source_files() for kind in file.classes}


def quoted():
    page = (DOCS / "troubleshooting.md").read_text()
    for row in re.findall(r"^\| (.*) \|$", page, re.MULTILINE):
        cells = [cell.strip() for cell in row.split(" | ")]
        column = 1 if cells[0].isdigit() else 0
        if found := re.fullmatch(r"`(.*[ …].*)`|`(Unauthorized|Forbidden)`", cells[column]):
            yield found[1] or found[2]


def is_said(message):
    """Whether one text of the sources has all parts of a message, in order."""
    parts = [part for part in message.split(ELLIPSIS) if part.strip()]
    longest, texts, at = max(parts, key=len), sources()[0], -1
    while (at := texts.find(longest, at + 1)) >= 0:
        text = texts[texts.rfind("\0", 0, at) + 1 : texts.find("\0", at)]
        if re.search(".*?".join(map(re.escape, parts)), text, re.DOTALL):
            return True
    return False


def test_messages_of_troubleshooting_are_in_the_sources():
    said = list(quoted())

    assert [message for message in said if not is_said(message)] == []
    assert len(said) > 100
    assert not is_said("the architecture … is not forbidden")


def script(name):
    """A module of scripts/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_area_of_errors_has_a_cure_and_messages():
    """The page is up to date, as test_house.py checks."""
    messages = script("messages")
    page = (DOCS / "reference" / "errors.md").read_text()
    areas = re.findall(r"^## (.*)\n\n(.*)\n\n\| message .*\n.*\n((?:\| .*\n)+)", page, re.MULTILINE)

    assert [(area.title, area.cure) for area in messages.AREAS] == [found[:2] for found in areas]
    assert sum(rows.count("\n") for _, _, rows in areas) > 1000
    assert messages.area_of("new_package/module.py") is None
    assert "the checkpoint lacks the tensor …" in page
    assert "Exactly one of prompt and messages must be given." in page


def test_diagrams_are_pictures_with_a_text_for_those_who_cannot_see_them():
    pictures = sorted((DOCS / "concepts").glob("*.svg"))

    assert len(pictures) == 5
    assert all(ET.parse(picture).getroot().get("aria-label") for picture in pictures)


def settings():
    known = set()
    for schema in (SERVE, ROUTE, BENCH, SIMULATE):
        known |= set(schema.fields) | {info.path for info in shown_sections(schema)}
    return known


def test_settings_named_on_pages_exist():
    known = settings()
    sections = {path.partition(".")[0] for path in known if "." in path}
    pages = ["troubleshooting", "sizing", "glossary", "getting-started", "not-here"]
    pages += [f"concepts/{name}" for name in ("index", "request", "radix-cache", "step", "memory")]
    wrong = []
    for page in pages:
        for name in re.findall(r"`(?:--)?([a-z_]+\.[a-z_-]+)`", (DOCS / f"{page}.md").read_text()):
            path = name.replace("-", "_")
            if path.partition(".")[0] in sections and path not in known:
                wrong.append(f"{page}: {name}")
    assert wrong == []


def test_names_of_the_glossary_exist():
    rows = re.findall(r"^\| .* \| (`.*`) \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    known = sources()[1] | settings() | {"models.registry"}

    assert [name for name in named if name not in known] == []
    assert len(rows) >= 60


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    """Every page is in the navigation, and every link and anchor leads somewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "<svg" in (tmp_path / "index.html").read_text()
    assert (tmp_path / "changelog.html").exists()


def test_links_that_leave_docs_become_code_or_pages():
    hooks = script("mkdocs_hooks")

    def fixed(text):
        return hooks.stay_inside(text, DOCS / "howto")

    assert (
        fixed("[here](gateway.md#a) and [x](../index.md)")
        == "[here](gateway.md#a) and [x](../index.md)"
    )
    assert fixed("[its file](../../src/sylvan/rpc/scheduler.proto)") == (
        "its file (`src/sylvan/rpc/scheduler.proto`)"
    )
    assert fixed("[`Makefile`](../../Makefile)") == "`Makefile`"
    assert fixed("[log](../../CHANGELOG.md)") == "[log](../changelog.md)"
    assert hooks.from_root("[how](docs/howto/ui.md#a)") == "[how](howto/ui.md#a)"
    assert hooks.from_root("[log](CHANGELOG.md), [make](Makefile)") == (
        "[log](changelog.md), make (`Makefile`)"
    )


def test_files_named_on_the_map_of_the_code_exist():
    page = (DOCS / "concepts" / "find-your-way.md").read_text()
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", page)) - {"src/sylvan/"}

    assert [name for name in named if not (ROOT / "src" / "sylvan" / name).exists()] == []
    assert len(named) > 40


def test_each_metric_of_sglang_is_exported_or_answered():
    """Dashboards ask for these names; operators find out why one is empty."""
    lines = (Path(__file__).parent / "sglang_metrics.txt").read_text().splitlines()
    names = [line for line in lines if not line.startswith("#")]
    reference = (DOCS / "reference" / "metrics.md").read_text()
    exported = {*re.findall(r"^\| `sglang:(\w+)`", reference, re.MULTILINE)}
    page = (DOCS / "howto" / "observe.md").read_text()
    answered = re.findall(r"`([\w*]+)`", page.partition("## What is not here")[2])
    left = [n for n in names if not {n, n.removesuffix("_total")} & exported]
    assert len(names) == 172
    assert len(left) < 80
    assert [n for n in left if not any(fnmatchcase(n, pattern) for pattern in answered)] == []


def command_lines():
    """Each `sylvan` command in a code block of a page, without prompt, variables and comment."""
    for page in (*DOCS.rglob("*.md"), ROOT / "README.md"):
        if page.parent.name == "reference":
            continue
        for block in re.findall(r"^ *```[^\n]*\n(.*?)^ *```", page.read_text(), re.DOTALL | re.M):
            for line in block.replace("\\\n", " ").splitlines():
                if found := re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(sylvan [a-z-]+.*)", line):
                    yield page.relative_to(ROOT), found[1]


def fault_of(line):
    """The error that the command would report for its flags and positions; empty if none."""
    words = shlex.split(re.split(r"\s+#|[|&;>]|\s2>", line)[0])[1:]
    name = next(name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS)
    spec = importlib.import_module(COMMANDS[name].module).SPEC
    try:
        parsed = parse_flags(words[len(name.split()) :], spec.all_options, tree=spec.tree)
    except ConfigError as error:
        return str(error)
    positions = [word for word in parsed.positions if word != "..."]
    return f"positions: {positions}" if len(positions) > spec.max_positions else ""


def test_commands_on_pages_are_understood():
    lines = list(command_lines())

    wrong = [(str(page), line, why) for page, line in lines if (why := fault_of(line))]
    assert wrong == []
    assert len(lines) > 80
    assert fault_of("sylvan serve --cache.page-sise 16")
