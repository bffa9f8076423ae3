"""The version reported in answers."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("sylvan")
