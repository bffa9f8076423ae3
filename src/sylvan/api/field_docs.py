"""Descriptions of fields in bodies, from the docstrings below them; not used for validation.

Pydantic reads these texts while it creates a class (`use_attribute_docstrings`), which takes a
quarter of a second for all bodies; they are needed only when a description is requested.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from sylvan.api.validation import WireModel


@cache
def field_docs(model: type[BaseModel]) -> Mapping[str, str]:
    """The text of each field, by its name in JSON."""
    docs: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, WireModel) and base is not WireModel:
            docs |= _module_docs(base.__module__).get(base.__qualname__, {})
    fields = model.model_fields.items()
    return {f.alias or name: docs[name] for name, f in fields if name in docs and not f.description}


def document(schemas: Mapping[str, dict[str, Any]]) -> None:
    """Add the texts to the schemas of models, by their names in an OpenAPI document."""
    for model in _all_models(WireModel):
        long = f"{model.__module__}.{model.__qualname__}".replace(".", "__")
        schema = schemas.get(long) or schemas.get(model.__name__)
        if schema is not None:
            document_one(schema, model)


def document_one(schema: Mapping[str, Any], model: type[BaseModel]) -> None:
    """Add the texts to the schema of a model."""
    properties = schema.get("properties", {})
    for name, text in field_docs(model).items():
        if name in properties:
            properties[name].setdefault("description", text)


def _all_models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for below in model.__subclasses__():
        yield below
        yield from _all_models(below)


@cache
def _module_docs(module: str) -> Mapping[str, dict[str, str]]:
    """Texts by class and field."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {node.name: dict(_class_docs(node)) for node in classes}


def _class_docs(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(node.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as doc)),
            ):
                yield name, inspect.cleandoc(doc)
            case _:
                pass
