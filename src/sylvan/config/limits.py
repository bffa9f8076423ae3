"""Limits of clients; see `sylvan.config.tree`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sylvan.config.section import Section
from sylvan.config.values import Bytes, Count


class LimitsConfig(Section, frozen=True):
    """Limits for clients; each rejection names its limit."""

    connections: Count = 4096
    """Most open connections; never more than file descriptors allow. Idle ones are closed to make
    room."""
    connections_per_address: Count = 3072
    """Most of these from one address; clients behind a proxy share one."""
    head_bytes: Bytes = 64 << 10
    """Largest request line plus headers; larger ones are refused with status 431."""
    head_s: Annotated[float, msgspec.Meta(gt=0)] = 15.0
    """Seconds for them to arrive; else status 408."""
    body_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Seconds for a body to arrive, and one more for each 4 KiB of it; else status 408."""
    write_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """Clients that read nothing of an answer for this many seconds are disconnected."""

    bodies_bytes: Bytes = 1 << 30
    """Total size of bodies of all running calls; beyond it calls are refused with status 503."""
    body_values: Count = 1 << 20
    """Most values in a body, counted by its commas."""
    body_depth: Annotated[int, msgspec.Meta(ge=8, le=512)] = 128
    """Deepest nesting of objects and arrays in a body."""
    body_names: Count = 65_536
    """Most names in one object of a body."""
    calls_per_tenant: Count = 2048
    """Most concurrent calls of one tenant, streams until they end; the next one is refused with
    status 429."""

    text_chars: Count = 1 << 20
    """Most characters of one call of `/tokenize`, `/parse_function_call` or `/separate_reasoning`.
    """
    samples: Count = 4096
    """Most prompts times samples of one request."""
    parameter_bytes: Bytes = 64 << 20
    """Largest total size of sampling parameters, such as grammars, of all samples of one request.
    """
    logprobs: Count = 32 << 20
    """Most log probabilities for one prompt: alternatives of all positions of all samples, up to
    the allowed number of tokens."""
    sessions: Count = 1024
    """Most sessions of one tenant; beyond it the longest idle one is closed."""
    session_tokens: Count = 1 << 24
    """Most tokens in all sessions of one tenant; beyond it, the longest idle ones are closed."""
    response_bytes: Bytes = 256 << 20
    """Total size of stored `/v1/responses` answers and their inputs; beyond it the oldest entries
    of the tenant with the most are deleted."""
    stored_bytes: Bytes = 1 << 30
    """Total size of files and batches of one tenant; more are refused with status 413. In memory
    without `server.data_dir`."""
    retention_s: Annotated[float, msgspec.Meta(ge=60)] = 30 * 86_400.0
    """Seconds after which files, ended batches and stored responses are deleted, and idle sessions
    closed."""
