"""Identity of KV besides the tokens: the model's files, and the way of computing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

import sylvan
from sylvan.checkpoints.formats import GGUF_INDEX
from sylvan.checkpoints.gguf.view import read_index
from sylvan.config.tree import Config
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.storage.manifest import GroupLayout, Manifest

_CHUNK = 16 << 20
_END = 1 << 20
_SAMPLES, _SAMPLE = 64, 16 << 10
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.index.json", "config.json")
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")


def kv_manifest(
    config: Config,
    model_dir: Path,
    *,
    dtype: str,
    runner: str,
    page_size: int,
    groups: tuple[GroupLayout, ...],
) -> Manifest:
    """Return the manifest of a served model; servers with equal manifests can share pages.

    Args:
        config: Resolved configuration.
        model_dir: The model's directory.
        dtype: dtype of weights and activations.
        runner: The runner.
        page_size: Tokens per page.
        groups: Page layouts.

    Raises:
        ConfigError: A file of the model is unreadable.
    """
    seed = (config.seed or 0) if config.load_format == "dummy" else None
    tokenizer = Path(config.tokenizer) if config.tokenizer else model_dir
    return Manifest(
        version=sylvan.__version__,
        weights=weights_digest(model_dir, seed),
        tokenizer=tokenizer_digest(tokenizer if tokenizer.is_dir() else model_dir),
        dtype=dtype,
        quantization=(config.quantization or "") + ("+fp8" if config.fp8_activations else ""),
        kv_dtype=_kv_dtype(config),
        runner=runner,
        attention=config.attention,
        context_len=int(config.context_len) if config.context_len != "auto" else 0,
        page_size=page_size,
        groups=groups,
    )


def weights_digest(model_dir: Path, dummy_seed: int | None = None) -> str:
    """Hash all weight files, and the model's config.

    `dummy_seed`: weights are random with this seed; only config.json counts.

    Raises:
        ConfigError: A file is unreadable.
    """
    if dummy_seed is not None:
        return f"dummy-{dummy_seed}-{_digest(model_dir.glob('config.json'))}"
    files = {path for pattern in _WEIGHTS for path in model_dir.glob(pattern)}
    if (model_dir / GGUF_INDEX).is_file():
        files.add(Path(read_index(model_dir)["file"]))
    return _digest(files)


def quick_digest(model_dir: Path) -> str:
    """Digest of the names and sizes of all weight files, their ends, and samples between these.

    Tells copies of a checkpoint from others, such as those with an adapter merged in, without
    reading all of it. Files of up to 2 MiB are read whole; a few wrong bytes within larger ones
    remain unseen.

    Raises:
        ConfigError: a file cannot be read.
    """
    found = xxhash.xxh3_128()
    files = {path for pattern in _WEIGHTS for path in model_dir.glob(pattern) if path.is_file()}
    for path in sorted(files, key=lambda path: path.name):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        try:
            with path.open("rb") as file:
                found.update(file.read(_END))
                for number in range(_SAMPLES if size > 2 * _END else 0):
                    file.seek(_END + (size - 2 * _END) * number // _SAMPLES)
                    found.update(file.read(_SAMPLE))
                file.seek(max(0, size - _END))
                found.update(file.read(_END))
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    return found.hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """Hash all files of a tokenizer.

    Raises:
        ConfigError: A file is unreadable.
    """
    return _digest({path for pattern in _TOKENIZER for path in folder.glob(pattern)})


def _kv_dtype(config: Config) -> str:
    """Return the dtype of KV, which differs if it was quantised in the host tier."""
    tiers = config.tiers
    if tiers is None or tiers.host_dtype == "same":
        return config.cache.dtype
    return f"{config.cache.dtype}, {tiers.host_dtype} in host memory"


def _digest(files: Iterable[Path]) -> str:
    """Return the XXH3-128 of names and contents, ordered by name."""
    found = xxhash.xxh3_128()
    for path in sorted(files, key=lambda path: path.name):
        if not path.is_file():
            continue
        found.update(path.name.encode())
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    found.update(chunk)
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    return found.hexdigest()
