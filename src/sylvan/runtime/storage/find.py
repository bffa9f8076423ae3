"""From a URL to a store: those of this package, and those of others by entry point."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.storage import backends
from sylvan.runtime.storage.api import PageStore, StoreKind, StoreLimits
from sylvan.utils import plugins

GROUP = "sylvan.kv_stores"
ANY_FSSPEC = "fsspec"
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
_OTHER_NAMES: Mapping[str, str] = {"valkey": "redis", "rediss": "redis", "valkeys": "redis"}


def scheme_of(url: str) -> str:
    """What a URL begins with; a path is a `file`."""
    found = _SCHEME.match(url)
    return found[1].lower() if found else "file"


def store_kind(url: str, others: Iterable[EntryPoint] | None = None) -> StoreKind:
    """Who opens a URL. A scheme that nobody claims is fsspec's: `s3`, `gs`, `az`, ...

    Args:
        url: Of a store, or a directory.
        others: Instead of the entry points of installed packages.

    Raises:
        ConfigError: another package's store cannot be imported.
    """
    scheme = scheme_of(url)
    own = plugins.options(backends)
    name = _OTHER_NAMES.get(scheme, scheme)
    if name in own:
        return plugins.load(backends, name).STORE
    for entry in entry_points(group=GROUP) if others is None else others:
        if entry.name == scheme:
            return _load(entry)
    return plugins.load(backends, ANY_FSSPEC).STORE


def open_store(url: str, limits: StoreLimits) -> PageStore:
    """Open the store at a URL.

    Raises:
        ConfigError: there is no such kind, or the URL or the limits make no sense.
        StoreError: it cannot be reached.
    """
    return store_kind(url).open(url, limits)


def check_url(url: str, limits: StoreLimits) -> None:
    """Check a URL and limits without reaching out.

    Raises:
        ConfigError: they cannot be served; says why.
    """
    store_kind(url).check(url, limits)


def shown(url: str) -> str:
    """A URL for logs and answers: without a password."""
    return re.sub(r"//[^/@]*@", "//", url)


def _load(entry: EntryPoint) -> StoreKind:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the store {entry.name!r} cannot be loaded from {entry.value!r}: {error}; uninstall "
            "or mend the package that offers it"
        ) from None
