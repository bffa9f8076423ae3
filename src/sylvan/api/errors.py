"""Error bodies in the format of each API family."""

from __future__ import annotations

from enum import Enum
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, Field

from sylvan.protocol.errors import ContextLengthError


class Family(Enum):
    """The API that defines a route, and so its error format."""

    NATIVE = "native"
    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


class NativeErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None = None
    code: int
    retryable: bool


class NativeError(BaseModel):
    """Error of the native routes; server errors have the flat format too."""

    object: str | None = Field(default=None, json_schema_extra={"const": "error"})
    message: str | None = None
    type: str | None = None
    code: int | None = None
    error: NativeErrorDetail


class OpenAIErrorDetail(BaseModel):
    """Details of an error, in OpenAI's format."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class OpenAIError(BaseModel):
    """Error of the OpenAI routes: flat and nested format in one body."""

    object: str = Field(default="error", json_schema_extra={"const": "error"})
    message: str
    type: str
    param: str | None = None
    code: int
    error: OpenAIErrorDetail


class ResponsesError(BaseModel):
    """Error of `/v1/responses` and of an unknown model: nested format only."""

    error: OpenAIErrorDetail


class AnthropicErrorDetail(BaseModel):
    """Details of an error, in Anthropic's format."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Error of the Anthropic routes."""

    type: str = Field(default="error", json_schema_extra={"const": "error"})
    error: AnthropicErrorDetail


class PlainError(BaseModel):
    """Error of the Ollama routes, and of failed authentication."""

    error: str


ERROR_MODELS: dict[Family, type[BaseModel]] = {
    Family.NATIVE: NativeError,
    Family.OPENAI: OpenAIError,
    Family.RESPONSES: ResponsesError,
    Family.ANTHROPIC: AnthropicError,
    Family.OLLAMA: PlainError,
}

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FLAT_TYPES = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
RETRYABLE = frozenset({408, 429, 503})


def anthropic_overflow(error: ContextLengthError) -> str | None:
    """Phrase a context overflow as Anthropic does, because its clients parse the message."""
    if error.prompt_tokens is None:
        return None
    if error.max_new_tokens is None:
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.prompt_tokens} + "
        f"{error.max_new_tokens} > {error.limit}, decrease input length or `max_tokens` and try "
        "again"
    )


def error_body(
    family: Family,
    status: int,
    message: str,
    *,
    param: str | None = None,
    kind: str | None = None,
    code: str | None = None,
) -> dict[str, Any]:
    """Build the JSON error body in the format of `family`.

    Args:
        family: API whose format is used.
        status: HTTP status.
        message: One sentence.
        param: The invalid field, if any.
        kind: `type` of the flat OpenAI format, if the default is too general.
        code: `code` of the nested OpenAI format, such as "model_not_found".
    """
    if family is Family.OLLAMA:
        return {"error": message}
    if family is Family.ANTHROPIC:
        default = "invalid_request_error" if status < 500 else "api_error"
        detail = {"type": _ANTHROPIC_TYPES.get(status, default), "message": message}
        return {"type": "error", "error": detail}
    if family is Family.NATIVE:
        flat = {"object": "error", "message": message, "type": str(status), "code": status}
        kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        nested_native = {
            "message": message,
            "type": kind,
            "param": param,
            "code": status,
            "retryable": status in RETRYABLE,
        }
        # SGLang clients read the flat format for overload and lost processes
        return {**(flat if status >= 500 else {}), "error": nested_native}
    default = "invalid_request_error" if status < 500 else "server_error"
    nested = {
        "message": message,
        "type": _OPENAI_TYPES.get(status, default),
        "param": param,
        "code": code,
    }
    if family is Family.RESPONSES:
        return {"error": nested}
    flat = kind or _FLAT_TYPES.get(status) or HTTPStatus(status).phrase
    return {
        "object": "error",
        "message": message,
        "type": flat,
        "param": param,
        "code": status,
        "error": nested,
    }
