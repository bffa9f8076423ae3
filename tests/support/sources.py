"""The package's source files, parsed once for all tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
ELLIPSIS = "…"
Function = ast.FunctionDef | ast.AsyncFunctionDef
_BROAD = {"Exception", "BaseException"}


@dataclass(frozen=True)
class DefinedFunction:
    """A public function, or a public method of a public class."""

    name: str
    line: int
    documented: bool


@dataclass
class SourceFile:
    """A module.

    Attributes:
        path: The file.
        documented: Whether it has a docstring.
        imports: Its import statements, as text.
        texts: Its strings, with `…` for what is put into them.
        classes: Names of all classes -> number of their public methods.
        public_classes: Names of those that anybody may import.
        functions: The public ones.
        broad_excepts: Lines where everything is caught, and not raised again.
    """

    path: Path
    documented: bool
    imports: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    classes: dict[str, int] = field(default_factory=dict)
    public_classes: list[str] = field(default_factory=list)
    functions: list[DefinedFunction] = field(default_factory=list)
    broad_excepts: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return str(self.path.relative_to(ROOT))

    def see(self, node: ast.AST) -> None:
        """Add a node of the module's tree."""
        match node:
            case ast.Import() | ast.ImportFrom():
                self.imports.append(ast.unparse(node))
            case ast.JoinedStr(values=values):
                parts = [v.value if isinstance(v, ast.Constant) else ELLIPSIS for v in values]
                self.texts.append("".join(map(str, parts)))
            case ast.Constant(value=str() as text):
                self.texts.append(text)
            case ast.ClassDef(name=name, body=body):
                methods = [n for n in body if isinstance(n, Function) and is_public(n)]
                self.classes[name] = len(methods)
            case ast.ExceptHandler(type=kind, body=body):
                caught = _BROAD if kind is None else {n.id for n in _names(kind)}
                if caught & _BROAD and not any(isinstance(n, ast.Raise) for n in body):
                    self.broad_excepts.append(node.lineno)


def is_public(node: ast.ClassDef | Function) -> bool:
    return not node.name.startswith("_")


@cache
def source_files() -> tuple[SourceFile, ...]:
    """All modules of the package."""
    return tuple(map(_read, SOURCES))


def _read(path: Path) -> SourceFile:
    tree = ast.parse(path.read_text())
    found = SourceFile(path, documented=ast.get_docstring(tree) is not None)
    for node in ast.walk(tree):
        found.see(node)
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and is_public(n)]
    found.public_classes = [node.name for node in classes]
    found.functions = [
        DefinedFunction(node.name, node.lineno, ast.get_docstring(node) is not None)
        for body in (tree.body, *(node.body for node in classes))
        for node in body
        if isinstance(node, Function) and is_public(node)
    ]
    return found


def _names(node: ast.expr) -> Iterator[ast.Name]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Name))
