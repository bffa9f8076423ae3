"""The rules of the house that linters do not know."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sources import SOURCES, source_files

ROOT = Path(__file__).parents[2]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_SUPPRESSIONS = 40  # may only fall
# As wide as the list of ops, the public contract, or the hooks of a capability.
WIDE_BY_NATURE = {"Tracer", "NativeTracer", "Engine", "Capability", "Hooks", "KVTiers"}
NO_TORCH = [
    *("sylvan", "sylvan.lang", "sylvan.gateway", "sylvan.api", "sylvan.text", "sylvan.config"),
    *("sylvan.runtime.engine.engine", "sylvan.runtime.server.app"),  # only schedulers need it
    "sylvan.runtime.engine.scheduler_process",  # only once a step, a request or a command needs it
]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_modules_fit_on_a_few_screens():
    lines = {name(p): len(p.read_text().splitlines()) for p in SOURCES}
    assert {p: n for p, n in lines.items() if n > 600} == {}
    assert statistics.median(lines.values()) <= 150
    assert {name(p): n for p in TESTS if (n := len(p.read_text().splitlines())) > 800} == {}


def test_cpp_has_100_columns():
    long = {
        f"{name(path)}:{number}"
        for path in (ROOT / "src/sylvan/kernels").rglob("*")
        if path.suffix in {".cpp", ".h"} and path.parent.name != "lib"  # generated
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    }
    assert long == set()


def test_classes_have_few_public_methods():
    crowded = {
        f"{file.name}:{kind}": count
        for file in source_files()
        for kind, count in file.classes.items()
        if count > 15 and kind not in WIDE_BY_NATURE
    }
    assert crowded == {}


def test_packages_say_what_they_are():
    packages = [file for file in source_files() if file.path.name == "__init__.py"]
    assert [file.name for file in packages if not file.documented] == []


def test_suppressions_may_only_fall():
    pattern = re.compile(r"#\s*(noqa|type:\s*ignore|pyright:\s*ignore)")
    found = [f"{name(p)}: {m.group()}" for p in SOURCES for m in pattern.finditer(p.read_text())]
    assert len(found) <= MAX_SUPPRESSIONS, "\n".join(found)


def test_broad_excepts_stand_only_where_a_process_must_continue():
    broad = [f"{file.name}:{line}" for file in source_files() for line in file.broad_excepts]
    assert len(broad) <= 6, "\n".join(broad)


def test_threads_are_called_where_no_exception_is_lost():
    pattern = re.compile(r"\basyncio\.to_thread\b|\.run_in_executor\(")
    callers = [name(p) for p in SOURCES if pattern.search(p.read_text())]
    assert callers == ["src/sylvan/utils/threads.py"]


def test_nothing_is_pickled():
    words = re.compile(r"\b(pickle|dill|cloudpickle|marshal|shelve|recv_pyobj|send_pyobj)\b")
    found = [f.name for f in source_files() if any(words.search(line) for line in f.imports)]
    assert found == []


@pytest.mark.parametrize("module", NO_TORCH)
def test_import_works_without_torch(module):
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        f"import {module}\n"
        "assert not any(m.startswith('transformers') for m in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_architecture_page_is_up_to_date():
    script = ROOT / "scripts" / "generate_docs.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True, timeout=120)


def test_links_in_docs_lead_somewhere():
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{name(page)} -> {target}")
    assert broken == []


def test_the_page_about_capabilities_shows_the_code_that_is_tested():
    page = (ROOT / "docs/howto/add-a-capability.md").read_text()
    tested = (ROOT / "tests/contract/test_capability.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    assert all(block.strip() in tested for block in blocks)
