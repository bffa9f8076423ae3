"""Validates bodies; errors name the first invalid field as the client spelled it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, InitErrorDetails

from sylvan.api.first_error import fail_fast
from sylvan.protocol.errors import RequestError

MAX_SHOWN = 80  # characters of a client's value or name that errors repeat


class WireModel(BaseModel):
    """An object from a client.

    Values are never converted ("5" is not a number); unknown names are reported in the
    answer. Validation of a list or map stops at its first error, so the size of an error does not
    depend on the size of the body. The validator of a model is compiled when it is first used: a
    server has many, of which clients use few. `field_docs` reads the texts below fields.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=(), defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        """See pydantic."""
        schema = handler(source)
        fail_fast(schema)
        return schema

    @property
    def passes_on(self) -> bool:
        """Whether unknown names are read elsewhere, for example by a chat template."""
        return False

    @property
    def without_effect(self) -> Collection[str]:
        """Return fields that are accepted but have no effect, always or beside other fields."""
        return ()


class OpenModel(WireModel):
    """An object whose unknown names are read elsewhere, for example by a chat template."""

    @property
    def passes_on(self) -> bool:
        return True


class ClosedModel(WireModel):
    """An object that rejects unknown names."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_name(cls, value: Any) -> Any:
        if isinstance(value, dict):  # by default, pydantic reports every one
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in cast(dict[str, Any], value):
                if name not in known:
                    fault = InitErrorDetails(type="extra_forbidden", loc=(name,), input=None)
                    raise ValidationError.from_exception_data(cls.__name__, [fault])
        return value


Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], value: Any) -> Model:
    """Validate `value`, decoded from JSON.

    Raises:
        RequestError: A field is invalid; the message names it and the violated limit.
    """
    if not isinstance(value, dict):
        raise RequestError(f"The body must be a JSON object, not {json_type(value)}.")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _explain(error, value) from error


def parse_struct(
    kind: type[msgspec.Struct], value: Any, where: str, names: Mapping[str, str]
) -> Any:
    """Validate `value` as a msgspec struct.

    Args:
        kind: Type of the struct.
        value: Decoded from JSON.
        where: Its path in the body.
        names: Paths of fields that are elsewhere in the body.

    Raises:
        RequestError: A field is invalid; the message names the limit or, for an unknown
            name, the nearest known one.
    """
    if not isinstance(value, dict):
        raise RequestError(f"{where} must be an object, not {json_type(value)}.", param=where)
    known = kind.__struct_fields__
    for name in value:
        if name not in known:
            raise unknown_name(name, known, where)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`").lstrip(".")
        field = re.split(r"[.\[]", path, maxsplit=1)[0]
        place = names.get(field) or f"{where}.{field}".lstrip(".")
        param = place + path[len(field) :] if path else where
        raise RequestError(f"{param}: {_lower(message)}.", param=param) from error


def unknown_name(name: str, known: Iterable[str], where: str) -> RequestError:
    """Build the error for an unknown name."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    shown = name[:MAX_SHOWN]
    path = f"{where}.{shown}" if where else shown
    return RequestError(f"{where or 'The body'} has no field {shown!r}{hint}", param=path)


def json_type(value: Any) -> str:
    """Return the JSON name of the type of `value`."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", str: "a string", dict: "an object", list: "an array"}
    return kinds.get(type(value), "a number")


def field_path(parts: Sequence[str | int]) -> str:
    """Format `("messages", 0, "role")` as `messages[0].role`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _explain(error: ValidationError, body: Any) -> RequestError:
    # Each branch of a union reports errors; the deepest error is in the branch that was meant.
    details = error.errors(include_url=False, include_context=False)
    paths = [_real_path(d["loc"], body, missing=d["type"] == "missing") for d in details]
    best = max(range(len(details)), key=lambda i: (len(paths[i]), -i))
    same = [i for i in range(len(details)) if paths[i] == paths[best]]
    path = field_path(paths[best])[: 2 * MAX_SHOWN]
    messages = list(dict.fromkeys(_lower(details[i]["msg"]) for i in same))
    return RequestError(f"{path or 'body'}: {'; or '.join(messages[:4])}.", param=path or None)


def _real_path(loc: tuple[str | int, ...], body: Any, *, missing: bool) -> tuple[str | int, ...]:
    """Return a location without the parts that name union branches.

    With `missing`, the last part is the name of the missing field.
    """
    path: list[str | int] = []
    value: Any = body
    for i, part in enumerate(loc):
        if (isinstance(value, dict) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        ):
            value = cast(Any, value)[part]
            path.append(part)
        elif missing and i == len(loc) - 1:
            path.append(part)
    return tuple(path)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
