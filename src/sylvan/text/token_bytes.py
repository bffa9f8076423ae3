"""The exact bytes of each token, from a tokenizer's decoder description.

Decoding is concatenation: the text of a token sequence is the concatenation of the tokens' bytes,
decoded as UTF-8. This holds for byte-level BPE (GPT-2, Llama 3, Qwen), for both kinds of
SentencePiece models (Llama 2, Gemma, Mistral), and approximately for word pieces. A token's only
context is whether it is the first one: some decoders drop one space there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@cache
def byte_of_char() -> Mapping[str, int]:
    """Map the characters of byte-level vocabularies (GPT-2) to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return table


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """How the tokens of one vocabulary become bytes.

    Attributes:
        byte_level: Whether characters represent bytes.
        byte_fallback: Whether tokens `<0xNN>` are single bytes.
        replacements: Literal replacements inside a token, in order.
        word_prefix: Prefix of tokens that continue a word; a space precedes other tokens.
        word_suffix: Suffix that ends a word; becomes a space.
        strips_first_space: Whether the first token of a text loses one leading space.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    word_prefix: str | None = None
    word_suffix: str | None = None
    strips_first_space: bool = False

    @classmethod
    def from_json(cls, decoder: Mapping[str, Any] | None) -> DecoderRules:
        """Read the `decoder` entry of a tokenizer.json; unknown steps are ignored."""
        if decoder is None:
            return cls(word_prefix="", strips_first_space=True)
        rules: dict[str, Any] = {}
        for step in _steps(decoder):
            kind = step.get("type")
            if kind == "ByteLevel":
                rules["byte_level"] = True
            elif kind == "ByteFallback":
                rules["byte_fallback"] = True
            elif kind in ("Metaspace", "Replace"):
                rules["replacements"] = (*rules.get("replacements", ()), *_replacement(step))
                rules["strips_first_space"] = rules.get("strips_first_space") or _is_prefixed(step)
            elif kind == "Strip":
                rules["strips_first_space"] = bool(step.get("start")) and step.get("content") == " "
            elif kind == "WordPiece":
                rules.update(word_prefix=step.get("prefix", "##"), strips_first_space=True)
            elif kind == "BPEDecoder":
                rules["word_suffix"] = step.get("suffix", "</w>")
        return cls(**rules)

    def to_bytes(self, token: str) -> bytes:
        """Bytes of an ordinary vocabulary entry."""
        if self.byte_level:
            table = byte_of_char()
            known = [table.get(char) for char in token]
            if None not in known:
                return bytes(byte for byte in known if byte is not None)
            return token.encode("utf-8", "replace")
        if self.byte_fallback and (match := _BYTE_TOKEN.match(token)):
            return bytes.fromhex(match[1])
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.word_suffix is not None:
            token = token.replace(self.word_suffix, " ")
        if self.word_prefix is not None:
            continues = self.word_prefix and token.startswith(self.word_prefix)
            token = token.removeprefix(self.word_prefix) if continues else " " + token
        return token.encode("utf-8", "replace")


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        for step in decoder.get("decoders", ()):
            yield from _steps(step)
    else:
        yield decoder


def _replacement(step: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    if step.get("type") == "Metaspace":
        return ((step.get("replacement", "\u2581"), " "),)
    literal = step.get("pattern", {}).get("String")
    return ((literal, step.get("content", "")),) if literal else ()


def _is_prefixed(step: Mapping[str, Any]) -> bool:
    if step.get("type") != "Metaspace":
        return False
    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
    return scheme != "never"
