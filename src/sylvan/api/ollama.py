"""Bodies of the Ollama API."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.openai.chat import ChatTool
from sylvan.api.openai.vectors import MAX_INPUTS
from sylvan.api.request_fields import Name
from sylvan.api.validation import WireModel

DEFAULT_NUM_PREDICT = 2048


class OllamaFunction(WireModel):
    """The function of a tool call."""

    name: str
    arguments: dict[str, Any] | str | None = None


class OllamaCall(WireModel):
    """A tool call in a message; arguments are an object."""

    function: OllamaFunction


class OllamaMessage(WireModel):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None


class OllamaBody(WireModel):
    """Fields common to both generation routes."""

    model: Name
    stream: bool | None = True
    """Stream the answer as JSON lines; default: true."""
    format: Literal["json", ""] | dict[str, Any] | None = None
    """`json`, or a JSON schema."""
    options: dict[str, Any] | None = None
    """Sampling parameters."""
    think: bool | str | None = None
    logprobs: bool | None = None
    """Return log probabilities of the text's tokens."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Most likely alternatives returned per position; needs `logprobs`."""


class OllamaChatBody(OllamaBody):
    """A conversation to answer."""

    messages: Annotated[list[OllamaMessage], Field(max_length=65536)]
    tools: Annotated[list[ChatTool], Field(max_length=1024)] | None = None


class OllamaGenerateBody(OllamaBody):
    """A prompt to answer."""

    prompt: str | None = ""
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = False
    """Continue the prompt as is, without the model's template."""
    images: list[str] | None = None


class OllamaEmbedBody(WireModel):
    """Texts to embed."""

    model: Name
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)]
    truncate: bool | None = True
    """Truncate a text that is too long; default: true."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: dict[str, Any] | None = None


class OllamaEmbeddingsBody(WireModel):
    """A text to embed; the older form of `/api/embed`."""

    model: Name
    prompt: str | None = ""
    options: dict[str, Any] | None = None


class OllamaShowBody(WireModel):
    """The model to describe."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None

    @property
    def without_effect(self) -> Collection[str]:
        return ("verbose",)


class OllamaPullBody(WireModel):
    """The model that a client wants to download."""

    model: Name | None = None
    name: Name | None = None
    """Older name of `model`."""
    stream: bool | None = True
    insecure: bool | None = None

    @property
    def without_effect(self) -> Collection[str]:
        return ("insecure",)


class OllamaReply(BaseModel):
    """An answer, or its last line."""

    model: str
    created_at: str
    message: dict[str, Any] | None = None
    response: str | None = None
    thinking: str | None = None
    logprobs: list[dict[str, Any]] | None = None
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaEmbedReply(BaseModel):
    """One embedding per text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsReply(BaseModel):
    """One embedding."""

    embedding: list[float]


class OllamaTags(BaseModel):
    """The available models."""

    models: list[dict[str, Any]]


class OllamaShow(BaseModel):
    """Description of a model."""

    license: str
    modelfile: str
    parameters: str
    template: str
    modified_at: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersion(BaseModel):
    """Version of the server."""

    version: str
