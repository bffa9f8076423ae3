"""The configuration tree: load it from all sources, resolve `auto` values, check the rest.

Start at `tree.Config`: one section per component, and the text under a field is its
documentation. `sources` gathers presets, files, environment and flags, `load` merges them with
their origins, `resolve` replaces each `auto` and says why, and `check` rejects what cannot work.
`route`, `bench` and `simulate` are the trees of the other commands; `aliases` maps SGLang's
flags.
"""

from __future__ import annotations

from sylvan.config.tree import Config

__all__ = ["Config"]
