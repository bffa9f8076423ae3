"""Generates `/openapi.json` from the table of routes: every body, answer and error."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sylvan.api.errors import ERROR_MODELS, Family, PlainError
from sylvan.api.field_docs import document, document_one
from sylvan.api.version import VERSION
from sylvan.runtime.server.endpoint import Endpoint
from sylvan.runtime.server.security import Level

_REF = "#/components/schemas/{model}"
_FORM: dict[str, Any] = {
    "schema": {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"type": "string"},
        },
        "required": ["file"],
    }
}
_MEANINGS = {
    400: "The request cannot be served; the message names field and limit.",
    401: "No key, or an unknown one.",
    403: "The key does not allow this.",
    404: "The named object does not exist.",
    413: "The body is larger than the limit.",
    429: "A budget is used up; see Retry-After.",
    500: "The model failed.",
    501: "This server does not support that.",
    503: "The server is overloaded or not ready; see Retry-After.",
}


@functools.cache
def describe(table: tuple[Endpoint, ...]) -> dict[str, Any]:
    """Build the OpenAPI document of a table of routes."""
    models = [(model, "validation") for model in _models(table)]
    _, definitions = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
    document(definitions.get("$defs", {}))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in table:
        for method in endpoint.methods:
            operation = _operation(endpoint, method)
            path = endpoint.path.replace(":path}", "}")
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sylvan",
            "version": VERSION,
            "description": "Serves a language model over several public APIs.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "API key"},
                "admin": {"type": "http", "scheme": "bearer", "description": "Admin key"},
            },
        },
    }


_SCHEMES = {Level.NORMAL: ("key",), Level.OWN_OR_ADMIN: ("key", "admin")}


def _models(table: Iterable[Endpoint]) -> list[type[BaseModel]]:
    models: dict[type[BaseModel], None] = dict.fromkeys(ERROR_MODELS.values())
    for endpoint in table:
        models.update(dict.fromkeys(m for m in (endpoint.body, endpoint.reply) if m is not None))
    return list(models)


def _operation(endpoint: Endpoint, method: str) -> dict[str, Any]:
    name = endpoint.path.strip("/").translate(str.maketrans("/{}:.-", "______")) or "root"
    doc = (endpoint.handler.__doc__ or "").strip()
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}_{name}",
        "tags": [endpoint.tag],
        "summary": endpoint.summary or doc.partition("\n")[0],
        **({"description": endpoint.missing_feature} if endpoint.missing_feature else {}),
        "responses": {
            **({} if endpoint.missing_feature else {"200": _success(endpoint)}),
            **dict(_failures(endpoint)),
        },
    }
    if parameters := [*_path_parameters(endpoint), *_query_parameters(endpoint)]:
        operation["parameters"] = parameters
    if endpoint.body is not None and method != "GET":
        operation["requestBody"] = {
            "required": not endpoint.body_optional,
            "content": {"application/json": {"schema": _ref(endpoint.body)}},
        }
    if endpoint.form:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": _FORM}}
    if endpoint.level is not Level.OPEN:
        schemes = _SCHEMES.get(endpoint.level, ("admin",))
        operation["security"] = [{}, *({scheme: []} for scheme in schemes)]
    return operation


def _success(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.reply is not None:
        content["application/json"] = {"schema": _ref(endpoint.reply)}
    elif endpoint.media_type:
        schema = {} if endpoint.media_type == "application/json" else {"type": "string"}
        content[endpoint.media_type] = {"schema": schema}
    if endpoint.stream:
        content[endpoint.stream] = {"schema": {"type": "string"}}
    return {"description": "Success.", **({"content": content} if content else {})}


def _failures(endpoint: Endpoint) -> Iterator[tuple[str, dict[str, Any]]]:
    statuses = set(endpoint.statuses)
    if endpoint.body is not None:
        statuses |= {400, 413, 500, 503}
    if endpoint.form:
        statuses |= {400, 413}
    if endpoint.query is not None:
        statuses.add(400)
    if endpoint.budgeted:
        statuses.add(429)
    if endpoint.level is not Level.OPEN:
        statuses |= {401, 403}
    for status in sorted(statuses):
        plain = status in (401, 403) and endpoint.family is not Family.ANTHROPIC
        model = PlainError if plain else ERROR_MODELS[endpoint.family]
        schema: dict[str, Any] = _ref(model)
        if endpoint.reply_on_failure and endpoint.reply is not None and status not in (401, 403):
            schema = {"anyOf": [schema, _ref(endpoint.reply)]}
        content = {"application/json": {"schema": schema}}
        if status in endpoint.plain_statuses:
            kind = endpoint.media_type
            content = {kind: {"schema": {"type": "string"}}} if kind else {}
        meaning = {"description": _MEANINGS.get(status, "Error.")}
        yield str(status), {**meaning, **({"content": content} if content else {})}


def _path_parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    for part in endpoint.path.split("{")[1:]:
        name = part.partition("}")[0].partition(":")[0]
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _query_parameters(endpoint: Endpoint) -> Iterator[dict[str, Any]]:
    if endpoint.query is None:
        return
    whole = endpoint.query.model_json_schema()
    document_one(whole, endpoint.query)
    for name, schema in whole["properties"].items():
        parameter = {"name": name, "in": "query", "required": False, "schema": schema}
        if "description" in schema:
            parameter["description"] = schema["description"]
        yield parameter


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
