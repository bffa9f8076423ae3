"""Makes pydantic's core schemas report only the first error of a list or map.

An error costs a microsecond or more to find and several to format, so a few megabytes of errors
would block a server for seconds and use gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from pydantic_core import (
    CoreSchema,
    InitErrorDetails,
    PydanticKnownError,
    SchemaValidator,
    ValidationError,
    core_schema,
)

_NO_SCHEMAS = ("metadata", "default", "serialization", "expected")


def fail_fast(schema: CoreSchema) -> None:
    """Change a schema, and all schemas in it, to stop at the first error.

    Raises:
        TypeError: A map with validated values has no `max_length`.
    """
    _change(schema)


def _change(node: Any) -> None:
    if isinstance(node, list | tuple):
        for item in cast(list[Any], node):
            _change(item)
    if not isinstance(node, dict):
        return
    node = cast(dict[str, Any], node)
    for name, item in node.items():
        if name == "fields":  # a mapping of field names
            _change(list(item.values()))
        elif name not in _NO_SCHEMAS:
            _change(item)
    kind = node.get("type")
    if kind in ("list", "tuple", "set", "frozenset"):
        node["fail_fast"] = True
    elif kind == "dict" and node.get("values_schema", {"type": "any"})["type"] != "any":
        _change_map(node)


def _change_map(node: dict[str, Any]) -> None:
    if "max_length" not in node:
        raise TypeError("a map whose values are checked needs a max_length")
    inner = dict(node)
    node.clear()
    check = _map_check(inner["max_length"], SchemaValidator(inner["values_schema"]))
    node.update(core_schema.no_info_before_validator_function(check, cast(CoreSchema, inner)))


def _map_check(most: int, values: SchemaValidator) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        found = cast(dict[str, Any], value)
        if len(found) > most:
            facts = {"field_type": "Dictionary", "max_length": most, "actual_length": len(found)}
            raise PydanticKnownError("too_long", facts)
        for name, item in found.items():
            try:
                values.validate_python(item, strict=True)
            except ValidationError as error:
                raise _at(name, error) from None
        return found

    return check


def _at(name: str, error: ValidationError) -> ValidationError:
    """Prefix an error with the name of its item."""
    faults: list[InitErrorDetails] = [
        {
            "type": fault["type"],
            "loc": (name, *fault["loc"]),
            "input": fault["input"],
            "ctx": fault.get("ctx", {}),
        }
        for fault in error.errors(include_url=False)
    ]
    return ValidationError.from_exception_data(error.title, faults)
