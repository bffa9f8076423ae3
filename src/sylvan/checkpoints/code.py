"""Python code of a checkpoint (`auto_map`), which runs only with `trust_remote_code`.

config.json and tokenizer_config.json name classes in neighbouring files: `modeling_x.XForCausalLM`.
Such files are imported in place as a package, so that relative imports work without copying.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

from sylvan.protocol.errors import ConfigError

UNTRUSTED = "which is run only with --trust-remote-code"
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def named_class(settings: Mapping[str, Any], kind: str) -> str | None:
    """The class that `auto_map` names for `kind` (as `AutoModelForCausalLM`), or None.

    Tokenizers have a pair: the last one, which is the fast tokenizer.
    """
    table = settings.get("auto_map")
    found = cast("Mapping[str, Any]", table).get(kind) if isinstance(table, Mapping) else None
    if isinstance(found, list | tuple):
        found = next((name for name in reversed(cast("list[Any]", found)) if name), None)
    return found if isinstance(found, str) else None


def load_class(folder: Path, name: str) -> Any:
    """Import a class that a checkpoint names.

    Args:
        folder: The checkpoint, which the operator trusts.
        name: `file.Class`, as in `auto_map`.

    Raises:
        ConfigError: The class is in another repository, does not exist, or fails to import.
    """
    where = f"the code {name!r} of {str(folder)!r}"
    if not _CLASS.fullmatch(name):
        raise ConfigError(f"{where} is not a class in a file of that directory; copy it there")
    module, _, attribute = name.rpartition(".")
    if not folder.joinpath(*module.split(".")).with_suffix(".py").is_file():
        raise ConfigError(f"{where} is missing: there is no {module.replace('.', '/')}.py")
    try:
        return getattr(importlib.import_module(f"{_package(folder)}.{module}"), attribute)
    except Exception as error:  # arbitrary code
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{where} cannot be imported: {type(error).__name__}: {reason}"
        ) from error


def _package(folder: Path) -> str:
    """Return a package for a directory."""
    place = str(folder.resolve())
    name = "sylvan_checkpoint_" + hashlib.sha256(place.encode()).hexdigest()[:16]
    if name not in sys.modules:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [place]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return name
