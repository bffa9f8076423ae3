"""Fixtures: the application over a scripted engine."""

from __future__ import annotations

from tests.support.http import checkpoint, client, engine

__all__ = ["checkpoint", "client", "engine"]
