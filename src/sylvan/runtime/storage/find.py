"""Opens a store by URL: built-in backends, and those of other packages by entry point."""

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
    """Return the scheme of a URL; a path is a `file`."""
    found = _SCHEME.match(url)
    return found[1].lower() if found else "file"


def store_kind(url: str, others: Iterable[EntryPoint] | None = None) -> StoreKind:
    """Return the backend for a URL. Unknown schemes are fsspec's: `s3`, `gs`, `az`, ...

    Args:
        url: URL of a store, or a directory.
        others: Replaces the entry points of installed packages.

    Raises:
        ConfigError: The backend of another package cannot be imported.
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
        ConfigError: There is no such backend, or the URL or the limits are invalid.
        StoreError: It is unreachable.
    """
    return store_kind(url).open(url, limits)


def check_url(url: str, limits: StoreLimits) -> None:
    """Check a URL and limits without connecting.

    Raises:
        ConfigError: They are invalid; the message says why.
    """
    store_kind(url).check(url, limits)


def shown(url: str) -> str:
    """Return a URL without its password, for logs and answers."""
    return re.sub(r"//[^/@]*@", "//", url)


def _load(entry: EntryPoint) -> StoreKind:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the store {entry.name!r} cannot be loaded from {entry.value!r}: {error}; uninstall "
            "or fix the package that provides it"
        ) from None
