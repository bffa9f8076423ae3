"""The version that answers name."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("sylvan")
