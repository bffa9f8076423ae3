"""One word per concept: names, docstrings and comments use the field's terms."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
SOURCES = sorted(p for p in SRC.rglob("*.py") if not p.name.endswith("_pb2.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef
CALLED_BY_LIBRARIES = {"forward", "format"}  # of `torch.nn.Module` and `logging.Formatter`


def test_public_functions_have_a_docstring_where_they_are_declared():
    """An implementation needs none: that of its interface holds."""
    documented = set(CALLED_BY_LIBRARIES)
    silent: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for function in _public_functions(ast.parse(path.read_text())):
            if ast.get_docstring(function):
                documented.add(function.name)
            else:
                silent[function.name].append(f"{path.relative_to(SRC)}:{function.lineno}")
    missing = {name: places for name, places in silent.items() if name not in documented}
    assert missing == {}


def _public_functions(tree: ast.Module) -> Iterator[Function]:
    bodies = [tree.body, *(n.body for n in tree.body if isinstance(n, ast.ClassDef) and _public(n))]
    return (n for body in bodies for n in body if isinstance(n, Function) and _public(n))


def _public(node: ast.ClassDef | Function) -> bool:
    return not node.name.startswith("_")
