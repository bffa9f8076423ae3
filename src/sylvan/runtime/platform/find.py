"""Finds kinds of devices by name, built-in ones and those of other packages, and opens devices."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.platform import kinds
from sylvan.runtime.platform.facts import DeviceKind
from sylvan.utils import plugins

GROUP = "sylvan.platforms"
AUTO_ORDER = ("cuda", "rocm")
"""Built-in kinds that `auto` prefers to a CPU, best first; kinds of other packages come before."""


def load_kinds(others: Iterable[EntryPoint] | None = None) -> Mapping[str, DeviceKind]:
    """All kinds by name; `auto` takes the first usable one among those that are `automatic`.

    Args:
        others: Entry points to use; None: those of installed packages.

    Raises:
        ConfigError: another package's kind cannot be imported, or has the name of a built-in one.
    """
    own = plugins.options(kinds)
    order = [*AUTO_ORDER, *(name for name in own if name not in AUTO_ORDER)]
    found: dict[str, DeviceKind] = {}
    for entry in entry_points(group=GROUP) if others is None else others:
        if entry.name in own:
            raise ConfigError(
                f"the device {entry.name!r} of {entry.value!r} has the name of a built-in one"
            )
        found[entry.name] = _load(entry)
    return found | {name: plugins.load(kinds, name).KIND for name in order}


def _load(entry: EntryPoint) -> DeviceKind:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the device {entry.name!r} cannot be loaded from {entry.value!r}: {error}; uninstall "
            "or fix the package that provides it"
        ) from None


def open_platform(kind: DeviceKind) -> Any:
    """Open the device of a kind.

    Returns: A `Platform`; its module imports torch.

    Raises:
        ConfigError: the device cannot be used here; says why.
    """
    if why := kind.problem():
        raise ConfigError(f"device={kind.facts.name}: {why}")
    module, _, function = kind.facts.opener.partition(":")
    try:
        found = importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # jax and jaxlib that do not fit, for one
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"device={kind.facts.name}: a package that it needs cannot be imported: {why}; "
            "reinstall it: "
            f"{kind.facts.how}"
        ) from error
    return getattr(found, function)(kind.facts)
