"""A directory in the usual layout that stands for a GGUF file.

It holds config.json, the tokenizer and a table of the tensors, and lies in the cache: everything
that reads model directories reads it. The weights stay in the GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sylvan.checkpoints.formats import GGUF_INDEX, weight_format
from sylvan.checkpoints.gguf.config import config_json
from sylvan.checkpoints.gguf.header import Header, read_header
from sylvan.checkpoints.gguf.names import DERIVED, checkpoint_name, turned_heads
from sylvan.checkpoints.gguf.tokenizer import text_files
from sylvan.protocol.errors import ConfigError
from sylvan.utils.json_files import read_json

_LAYOUT = 1  # raise it when what a view holds changes


def gguf_file(model: Path) -> Path | None:
    """The GGUF file that `model` is, or holds beside no other weights; None: there is none.

    Raises:
        ConfigError: there are several; names them.
    """
    if model.is_file() and model.suffix == ".gguf":
        return model
    if not model.is_dir() or weight_format(model) is not None:
        return None
    files = sorted(model.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise ConfigError(f"model: {str(model)!r} holds several GGUF files ({names}); name one")
    return files[0] if files else None


def gguf_view(file: Path, cache: Path) -> Path:
    """The directory under `cache` that stands for `file`; made unless it is there.

    Raises:
        ConfigError: the file cannot be read or served; one sentence.
    """
    file = file.resolve()
    found = file.stat()
    identity = f"{_LAYOUT}\n{file}\n{found.st_size}\n{found.st_mtime_ns}"
    folder = cache / f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if (folder / GGUF_INDEX).is_file():
        return folder
    contents = _contents(read_header(file))
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
    except OSError as error:  # another process was faster
        if not (folder / GGUF_INDEX).is_file():
            raise ConfigError(f"model: cannot write {str(folder)!r}: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def read_index(folder: Path) -> dict[str, Any]:
    """`file`, and of each of `tensors` name, type, shape, start, stop and turned heads.

    Raises:
        ConfigError: `folder` stands for no GGUF file, or that has changed since.
    """
    try:
        index = read_json(folder / GGUF_INDEX)
    except (OSError, ValueError):
        raise ConfigError(f"{str(folder)!r} holds no GGUF file") from None
    file = Path(index["file"])
    if not file.is_file() or file.stat().st_size != index["size"]:
        raise ConfigError(f"{str(file)!r} is gone or has changed; start again")
    return index


def _contents(header: Header) -> dict[str, Any]:
    """Name -> content of each file of the directory."""
    config = config_json(header)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    entries = [
        {
            "name": checkpoint_name(tensor.name, header),
            "type": tensor.quant.name,
            "shape": tensor.shape,
            "start": tensor.start,
            "stop": tensor.stop,
            "turned": turned_heads(tensor.name, config["model_type"], heads, kv_heads),
        }
        for tensor in header.tensors.values()
        if tensor.name not in DERIVED
    ]
    index = {
        "file": str(header.file),
        "size": header.file.stat().st_size,
        "metadata": {
            key: value
            for key, value in header.metadata.items()
            if not isinstance(value, list) and key != "tokenizer.chat_template"
        },
        "tensors": entries,
    }
    return {"config.json": config, **text_files(header), GGUF_INDEX: index}
