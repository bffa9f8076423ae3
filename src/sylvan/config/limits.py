"""What clients may use; see `sylvan.config.tree`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sylvan.config.section import Section
from sylvan.config.values import Bytes, Count


class LimitsConfig(Section, frozen=True):
    """What clients may use: each refusal names the limit."""

    connections: Count = 4096
    """Connections that are open at a time; never more than there are file descriptors for. Idle
    ones end to make room."""
    connections_per_address: Count = 3072
    """Of these, from one address; clients behind a proxy share one."""
    head_bytes: Bytes = 64 << 10
    """Request line and headers of a request; larger ones are refused with status 431."""
    head_s: Annotated[float, msgspec.Meta(gt=0)] = 15.0
    """Seconds in which they have to arrive; else status 408."""
    body_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Seconds for a body to arrive, and one more for each 4 KiB of it; else status 408."""
    write_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """Seconds in which a client may read nothing of an answer before its connection ends."""

    bodies_bytes: Bytes = 1 << 30
    """Bodies of all calls under way together; one more is refused with status 503."""
    body_values: Count = 1 << 20
    """Values in a body, counted by its commas."""
    body_depth: Annotated[int, msgspec.Meta(ge=8, le=512)] = 128
    """Levels of objects and arrays in a body."""
    body_names: Count = 65_536
    """Names in one object of a body."""
    calls_per_tenant: Count = 2048
    """Calls of one tenant under way at a time, streams until they end; one more is refused with
    status 429."""

    text_chars: Count = 1 << 20
    """Characters of one call of `/tokenize`, `/parse_function_call` or `/separate_reasoning`."""
    samples: Count = 4096
    """Prompts times samples of one request."""
    parameter_bytes: Bytes = 64 << 20
    """Sampling parameters, such as grammars, of all samples of one request together."""
    logprobs: Count = 32 << 20
    """Log probabilities that one prompt may bring: alternatives of all positions of all samples, as
    many tokens as the client allows."""
    sessions: Count = 1024
    """Sessions of one tenant; beyond it the one that rested longest is closed."""
    session_tokens: Count = 1 << 24
    """Tokens of all turns of the sessions of one tenant; likewise."""
    response_bytes: Bytes = 256 << 20
    """Answers of `/v1/responses` that are kept, with what led to them; beyond it the oldest go of
    the tenant that has the most."""
    stored_bytes: Bytes = 1 << 30
    """Files and batches of one tenant; more are refused with status 413. In memory without
    `server.data_dir`."""
    retention_s: Annotated[float, msgspec.Meta(ge=60)] = 30 * 86_400.0
    """Seconds after which files, ended batches and stored responses are forgotten, and sessions
    closed that nobody used."""
