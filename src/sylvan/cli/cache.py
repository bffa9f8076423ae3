"""`sylvan cache`: lists, verifies, prunes, exports and imports a KV store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from sylvan.cli.main import DONE, FAILED, Spec
from sylvan.config.fields import size_text
from sylvan.config.flags import Option, Parsed
from sylvan.config.parse import parse_size
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.storage import maintenance
from sylvan.runtime.storage.api import PageStore, StoreError, StoreLimits
from sylvan.runtime.storage.backends.file import INDEX, directory_of
from sylvan.runtime.storage.find import open_store, scheme_of, shown
from sylvan.runtime.storage.manifest import manifest_of
from sylvan.utils.clock import unix_time

SPEC = Spec(
    usage="cache ls|verify|prune STORE | cache export|import STORE FILE",
    doc="Maintain a KV store: a directory, or a URL as in --tiers.storage. `ls` lists its pages, "
    "`verify` reads and checks every page, `prune` removes unused pages and leftovers of crashed "
    "servers. `export` writes its pages to a tar file, and `import` adds such a file to another "
    "store. Servers may use the store meanwhile.",
    options=(
        Option("remove", "verify: also remove invalid pages."),
        Option("all", "prune: remove all pages, and the manifest of the model."),
        Option("unused_for", "prune: remove pages unused for this many hours.", metavar="HOURS"),
        Option(
            "max_bytes", "prune: keep the newest pages up to this size (10GiB).", metavar="SIZE"
        ),
    ),
    tree=None,
    max_positions=3,
)


def run(args: Parsed) -> int:
    words = args.positions
    wanted = {**dict.fromkeys(_COMMANDS, 2), "export": 3, "import": 3}
    if not words or len(words) != wanted.get(words[0]):
        raise ConfigError(f"usage: sylvan {SPEC.usage}")
    try:
        with closing(_open(words[1], may_be_new=words[0] == "import")) as store:
            return _COMMANDS[words[0]](store, args)
    except StoreError as error:
        raise ConfigError(f"{shown(words[1])}: {error}") from None


def _open(url: str, *, may_be_new: bool) -> PageStore:
    """Open a store; a directory must already be one, unless pages are imported."""
    if scheme_of(url) == "file" and not may_be_new and not (directory_of(url) / INDEX).is_file():
        raise ConfigError(f"{url!r} is not a store of KV pages")
    return open_store(url, StoreLimits())


def _list(store: PageStore, args: Parsed) -> int:
    manifest, found = manifest_of(store), maintenance.contents(store)
    total = sum(content.num_bytes for content in found.values())
    count = sum(sum(content.pages.values()) for content in found.values())
    print(f"{shown(args.positions[1])}: {count} pages, {size_text(total)}")
    if manifest is not None:
        print(
            f"  for weights {manifest.weights}, {manifest.dtype}, KV of {manifest.kv_dtype}, "
            f"{manifest.page_size} tokens a page, runner {manifest.runner}, "
            f"Sylvan {manifest.version}"
        )
    for space, content in sorted(found.items(), key=lambda item: -item[1].num_bytes):
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(content.pages.items()))
        print(f"  {space}  {size_text(content.num_bytes):>10}  {_when(content.used_s)}  {kinds}")
    return DONE


def _verify(store: PageStore, args: Parsed) -> int:
    found = maintenance.verify(store)
    print(f"{found.good} pages are right")
    for fault, names in found.wrong.items():
        print(f"{len(names)} are {fault}, for example {names[0]}")
    if args.has("remove"):
        maintenance.remove(store, found.wrong_names)
        print(f"{len(found.wrong_names)} were removed")
        return DONE
    return FAILED if found.wrong else DONE


def _prune(store: PageStore, args: Parsed) -> int:
    if args.has("all"):
        store.clear()
        print("everything was removed")
        return DONE
    hours, size = args.options.get("unused_for"), args.options.get("max_bytes")
    count = maintenance.prune(
        store,
        unused_since_s=None if hours is None else unix_time() - 3600 * _hours(hours),
        max_bytes=None if size is None else _size(size),
    )
    print(f"{count} removed")
    return DONE


def _export(store: PageStore, args: Parsed) -> int:
    path = Path(args.positions[2]).expanduser()
    print(f"{path}: {maintenance.export_pages(store, path)} pages")
    return DONE


def _import(store: PageStore, args: Parsed) -> int:
    path = Path(args.positions[2]).expanduser()
    print(f"{maintenance.import_pages(store, path, shown(args.positions[1]))} pages")
    return DONE


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = -1.0
    if not 0 <= hours < 1e9:
        raise ConfigError(f"--unused-for: expected a number of hours, got {text!r}")
    return hours


def _size(text: str) -> int:
    found = parse_size(text)
    if found is None:
        raise ConfigError(f"--max-bytes: expected a size such as 10GiB, got {text!r}")
    return found


def _when(used_s: float) -> str:
    return datetime.fromtimestamp(used_s, UTC).strftime("%Y-%m-%d %H:%M") if used_s else "-" * 16


_COMMANDS: Mapping[str, Callable[[PageStore, Parsed], int]] = {
    "ls": _list,
    "verify": _verify,
    "prune": _prune,
    "export": _export,
    "import": _import,
}
