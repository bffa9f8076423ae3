"""Sylvan: serve language models, and program them.

`import sylvan as sgl` gives the frontend language; `sylvan.Engine` embeds a runtime. Names are
imported when first used, so that `import sylvan` stays instant.
"""

from __future__ import annotations

import importlib
import os.path

__version__ = "0.1.0"

_ENGINE = {
    "Engine": "sylvan.runtime.engine.engine",
    "ServerArgs": "sylvan.runtime.engine.arguments",
}


def __getattr__(name: str) -> object:
    if name.startswith("_") or os.path.isdir(os.path.join(__path__[0], name)):
        raise AttributeError(name)  # of a package it is asked whether it has been imported
    module = importlib.import_module(_ENGINE.get(name, "sylvan.lang"))
    try:
        value = getattr(module, name)
    except AttributeError:
        raise AttributeError(f"module 'sylvan' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    lang = importlib.import_module("sylvan.lang")
    return sorted({"__version__", *_ENGINE, *getattr(lang, "__all__", ())})
