"""Prompts that a sentence-transformers model expects before the texts that it embeds.

`config_sentence_transformers.json` names prompts ("query", "document") and the default one;
https://sbert.net/docs/package_reference/sentence_transformer/SentenceTransformer.html.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.utils.json_files import read_json

FILE = "config_sentence_transformers.json"
QUERY = ("query",)
DOCUMENT = ("document", "passage", "corpus")
"""Names that models use for the prompts of queries and of documents."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a model.

    Attributes:
        named: By name.
        default: The prompt before texts for which none is requested.
        left_out: Pooling excludes the prompt's tokens, which is not supported.
        lower: Texts are lower-cased.
    """

    named: Mapping[str, str] = field(default_factory=dict[str, str])
    default: str = ""
    left_out: bool = False
    lower: bool = False

    def apply(self, text: str, name: str | None = None) -> str:
        """Return the text with its prompt.

        Raises:
            RequestError: There is no prompt of that name, or it is not supported.
        """
        if name is not None and name not in self.named:
            known = ", ".join(sorted(self.named)) or "no prompts at all"
            message = f"prompt_name: there is no prompt {name[:80]!r}; this model has {known}."
            raise RequestError(message, param="prompt_name")
        prompt = self.default if name is None else self.named[name]
        if prompt and self.left_out:
            message = (
                "prompt_name cannot be honoured: this model leaves prompts out of its vectors."
            )
            raise RequestError(message, param="prompt_name")
        joined = prompt + text
        return joined.lower() if self.lower else joined

    def first_of(self, *names: str) -> str | None:
        """Return the first of the names that the model has."""
        return next((name for name in names if name in self.named), None)


@functools.lru_cache(maxsize=16)
def read_prompts(model_path: str) -> Prompts:
    """Read a checkpoint's prompts; none if it names none.

    Raises:
        ConfigError: Its files are unreadable, or name a default prompt that does not exist.
    """
    folder = Path(model_path)
    raw = _read(folder / FILE)
    found = raw.get("prompts")
    named = {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}
    usual = raw.get("default_prompt_name")
    if usual is not None and usual not in named:
        raise ConfigError(f"{FILE}: there is no prompt {usual!r}, which it calls the usual one")
    return Prompts(
        named=named,
        default=named[usual] if usual is not None else "",
        left_out=_leaves_prompts_out(folder),
        lower=_read(folder / "sentence_bert_config.json").get("do_lower_case") is True,
    )


def _leaves_prompts_out(folder: Path) -> bool:
    configs = sorted(folder.glob("*_Pooling/config.json"))
    return any(_read(config).get("include_prompt") is False for config in configs)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}
