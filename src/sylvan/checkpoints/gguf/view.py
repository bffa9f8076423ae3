"""A Hugging Face model directory as a view of a GGUF file.

The view is in the cache and has config.json, the tokenizer and a table of tensors, so all code that
reads model directories works. The weights stay in the GGUF file.
"""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sylvan.checkpoints.formats import GGUF_INDEX, weight_format
from sylvan.checkpoints.gguf.config import config_json
from sylvan.checkpoints.gguf.families import family_of
from sylvan.checkpoints.gguf.header import PART, Header, read_model
from sylvan.checkpoints.gguf.keys import Keys
from sylvan.checkpoints.gguf.names import DERIVED, entries_of, layer_of, with_latent_heads
from sylvan.checkpoints.gguf.tokenizer import text_files
from sylvan.protocol.errors import ConfigError
from sylvan.utils.json_files import read_json

_LAYOUT = 4  # increment when the contents of views change


def gguf_file(model: Path) -> Path | None:
    """The GGUF file at `model`, or the only weights in that directory; None: there is none.

    Raises:
        ConfigError: There are several; names them.
    """
    if model.is_file() and model.suffix == ".gguf":
        return _first_part(model)
    if not model.is_dir() or weight_format(model) is not None:
        return None
    files = sorted({_first_part(file) for file in model.glob("*.gguf")})
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise ConfigError(f"model: {str(model)!r} holds several GGUF files ({names}); name one")
    return files[0] if files else None


def _parts(file: Path) -> list[Path]:
    """The existing parts of a model, given its first part."""
    name = PART.match(file.name)
    return (
        sorted(file.parent.glob(f"{glob.escape(name[1])}-*-of-{name[3]}.gguf")) if name else [file]
    )


def _first_part(file: Path) -> Path:
    """The first part of the model that a file belongs to; the file itself if not split."""
    name = PART.match(file.name)
    first = file.with_name(f"{name[1]}-00001-of-{name[3]}.gguf") if name else file
    return first if first.is_file() else file


def gguf_view(file: Path, cache: Path) -> Path:
    """Return the view of `file` under `cache`; create it if needed.

    Raises:
        ConfigError: The file cannot be read or served; one sentence.
    """
    file = file.resolve()
    found = [part.stat() for part in _parts(file)]
    parts = "".join(f"\n{part.st_size}\n{part.st_mtime_ns}" for part in found)
    identity = f"{_LAYOUT}\n{file}{parts}"
    folder = cache / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if (folder / GGUF_INDEX).is_file():
        return folder
    contents = _contents(read_model(file))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=cache))
    except OSError as error:
        raise ConfigError(f"model: cannot write to the cache {str(cache)!r}: {error}") from None
    try:
        for name, content in contents.items():
            text = json.dumps(content) if not isinstance(content, str) else content
            (part / name).write_text(text, "utf-8")
        if not (folder / GGUF_INDEX).is_file():
            part.rename(folder)
    except OSError as error:  # another process has created it meanwhile
        if not (folder / GGUF_INDEX).is_file():
            raise ConfigError(f"model: cannot write {str(folder)!r}: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def read_index(folder: Path) -> dict[str, Any]:
    """`file`, all `files` with their sizes, and `tensors` as `names.entries_of` has them.

    Raises:
        ConfigError: `folder` is not a view of a GGUF file, or the file has changed since.
    """
    try:
        index = read_json(folder / GGUF_INDEX)
    except (OSError, ValueError):
        raise ConfigError(f"{str(folder)!r} holds no GGUF file") from None
    for part in index["files"]:
        file = Path(part["file"])
        if not file.is_file() or file.stat().st_size != part["size"]:
            raise ConfigError(f"{str(file)!r} is gone or has changed; start again")
    return index


def _contents(header: Header) -> dict[str, Any]:
    """Name -> content of each file of the view."""
    config = config_json(header)
    family = family_of(Keys(header))
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers = config["num_hidden_layers"]
    files = list(dict.fromkeys([header.file, *(t.file for t in header.tensors.values())]))
    entries = [
        entry | {"file": files.index(entry["file"])}
        for tensor in header.tensors.values()
        if tensor.name not in DERIVED and layer_of(tensor.name) < layers
        for entry in entries_of(tensor, header, family, heads)
    ]
    if family.latent:
        entries = with_latent_heads(entries, config["num_attention_heads"])
    index = {
        "file": str(header.file),
        "files": [{"file": str(file), "size": file.stat().st_size} for file in files],
        "metadata": {
            key: value
            for key, value in header.metadata.items()
            if not isinstance(value, list) and key != "tokenizer.chat_template"
        },
        "tensors": entries,
    }
    return {"config.json": config, **text_files(header), GGUF_INDEX: index}
