"""The configuration tree: load it from all sources, resolve `auto` values, check the rest."""

from __future__ import annotations

from sylvan.config.tree import Config

__all__ = ["Config"]
