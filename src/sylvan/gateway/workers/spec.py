"""The specification of a worker."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from sylvan.protocol.errors import RequestError

Kind = Literal["regular", "prefill", "decode"]
KINDS: tuple[Kind, ...] = ("regular", "prefill", "decode")
Connection = Literal["http", "grpc"]

MAX_URL_CHARS = 2048
MAX_LABELS = 64

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Label = Annotated[str, msgspec.Meta(max_length=256)]


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker as its operator describes it: the body of `POST /workers`.

    Attributes:
        url: `http://`, `https://` or `grpc://`, with host and port.
        api_key: Key for the worker.
        model_id: Model that it serves; by default, the worker is asked.
        priority: Workers of a higher priority are used while one of them is available.
        cost: Weight of its load; a worker of half the speed has 2.
        worker_type: Its kind: regular, prefill or decode.
        bootstrap_port: Port on which a prefill worker meets decode workers; default: 8998.
        runtime: Name of its software.
        tokenizer_path: Directory of its tokenizer, for gRPC workers.
        reasoning_parser: Format of its reasoning, for gRPC workers.
        tool_parser: Format of its tool calls, for gRPC workers.
        chat_template: File with its chat template, for gRPC workers.
        labels: Free labels of the operator; `policy` sets the routing policy of its model.
        health_check_timeout_secs: Overrides `health.timeout_s`.
        health_check_interval_secs: Overrides `health.interval_s`.
        health_success_threshold: Overrides `health.successes`.
        health_failure_threshold: Overrides `health.failures`.
        disable_health_check: Never check its health.
        max_connection_attempts: Connection attempts before adding it fails.
        dp_aware: Treat each data-parallel rank as a worker of its own.
    """

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_URL_CHARS)]
    api_key: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)] | None = None
    model_id: Name | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 50
    cost: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    worker_type: Kind = "regular"
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    runtime: Name = "sylvan"
    tokenizer_path: Name | None = None
    reasoning_parser: Name | None = None
    tool_parser: Name | None = None
    chat_template: Name | None = None
    labels: Annotated[dict[Label, Label], msgspec.Meta(max_length=MAX_LABELS)] = {}
    health_check_timeout_secs: Positive | None = None
    health_check_interval_secs: Positive | None = None
    health_success_threshold: Annotated[int, msgspec.Meta(ge=1)] | None = None
    health_failure_threshold: Annotated[int, msgspec.Meta(ge=1)] | None = None
    disable_health_check: bool = False
    max_connection_attempts: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 20
    dp_aware: bool = False

    @property
    def connection(self) -> Connection:
        """Its protocol."""
        return "grpc" if self.url.startswith("grpc") else "http"

    @property
    def host(self) -> str:
        """The host, without brackets."""
        return urlsplit(self.url).hostname or ""


def checked(spec: WorkerSpec) -> WorkerSpec:
    """Return the spec with a normalised address.

    Raises:
        RequestError: The address is invalid.
    """
    return msgspec.structs.replace(spec, url=normal_url(spec.url))


def normal_url(url: str) -> str:
    """Normalise an address: no path, no trailing slash, lower case.

    Raises:
        RequestError: It is not an address of a worker.
    """
    try:
        parts = urlsplit(url.strip())
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise RequestError(f"url: {url[:200]!r} is not an address: {error}", param="url") from error
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not host:
        message = f"url: expected http://, https:// or grpc:// and a host, not {url[:200]!r}"
        raise RequestError(message, param="url")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        message = f"url: expected only scheme, host and port, not {url[:200]!r}"
        raise RequestError(message, param="url")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (f":{port}" if port is not None else "")
