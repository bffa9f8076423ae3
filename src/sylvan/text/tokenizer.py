"""Encodes and decodes text: exact bytes, and user text that cannot forge control tokens."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from sylvan.checkpoints.code import UNTRUSTED, load_class, named_class
from sylvan.protocol.errors import ConfigError
from sylvan.text.affixes import Affixes
from sylvan.text.checkpoint import TokenizerFiles, read_files
from sylvan.text.encoding import token_ids
from sylvan.text.safe_encoding import SafeEncoder, alternation
from sylvan.text.token_bytes import DecoderRules

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_CONVERSION_ERRORS = (
    ImportError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
)


class Tokenizer:
    """A vocabulary and its rules; immutable after construction and safe to share between threads.

    Attributes:
        bos_id: Start token, or None.
        eos_ids: Tokens that end generation, the most specific source first.
        pad_id: Padding token, or None.
        affixes: Special tokens added before and after a text.
        added_tokens: Tokens outside of the trained vocabulary, and how they are matched.
        special_ids: Tokens that `skip_special_tokens` hides.
        protected: Text and id of every token that user text must not forge: special tokens, and
          added tokens that a chat template writes (such as `<tool_call>`).
        chat_templates: Templates by name; the default one is called "default".
        vocab_size: Largest id plus one.
        normalises_into_control: Whether normalisation may turn text into a protected token.
        strips_first_space: Whether the first token of a text loses one leading space.
        files: The checkpoint's files.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, files: TokenizerFiles, chat_template: str | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.files = files
        named = _add_configured_tokens(backend, files.config)
        added = backend.get_added_tokens_decoder()
        self._added = {token: entry.content for token, entry in added.items()}
        self.added_tokens = tuple(added.values())
        self.special_ids = frozenset(t for t, entry in added.items() if entry.special) | {
            token for text in named.values() if (token := backend.token_to_id(text)) is not None
        }
        self._rules = DecoderRules.from_json(json.loads(backend.to_str()).get("decoder"))
        self.strips_first_space = self._rules.strips_first_space
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self.bos_id = _first(backend, named.get("bos_token"), files.bos_id)
        self.affixes = Affixes.of(backend, self.bos_id)
        self.pad_id = _first(backend, named.get("pad_token"), files.pad_id)
        eos = _first(backend, named.get("eos_token"), None)
        self.eos_ids: tuple[int, ...] = tuple(
            dict.fromkeys((*files.eos_ids, *([] if eos is None else [eos])))
        )
        self.chat_templates = (
            dict(files.templates) if chat_template is None else {"default": chat_template}
        )
        self.named_tokens: Mapping[str, str] = named
        self.protected = self._find_protected()
        self.protected_pattern = alternation(self.protected)
        self._lock = threading.Lock()
        self._safe_encoder: SafeEncoder | None = None

    @classmethod
    def load(
        cls, model_dir: str | Path, *, chat_template: str | None = None, trusted: bool = False
    ) -> Tokenizer:
        """Read the tokenizer of a checkpoint directory.

        Args:
            model_dir: The directory.
            chat_template: Text of a template that replaces all of the checkpoint's.
            trusted: Whether Python files of the directory may run.

        Raises:
            ConfigError: Files are missing or broken; the message names them.
        """
        files = read_files(model_dir)
        if files.tokenizer_json is None:
            backend = _convert_slow(Path(model_dir), files.config, trusted=trusted)
            return cls(backend, files, chat_template)
        try:
            backend = tokenizers.Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            path = Path(model_dir) / "tokenizer.json"
            raise ConfigError(f"{path} is not a tokenizer that can be read: {error}") from error
        return cls(backend, files, chat_template)

    @property
    def chat_template(self) -> str | None:
        """The default chat template, or the only one, or None."""
        if "default" in self.chat_templates or len(self.chat_templates) != 1:
            return self.chat_templates.get("default")
        return next(iter(self.chat_templates.values()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of trusted text: control tokens spelt in it are recognised.

        A start token spelt in the text is not added a second time.
        """
        return self.affixes.without_second_bos(
            token_ids(self._backend, text, add_special_tokens=add_special_tokens), text
        )

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """As `encode`, for many texts at once on all cores."""
        batch = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [
            self.affixes.without_second_bos(item.ids, text)
            for item, text in zip(batch, texts, strict=True)
        ]

    def encode_user(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of untrusted text: protected tokens spelt in it stay plain text."""
        if self.spells_control_token(text):
            return self.encode_segments([(text, False)], add_special_tokens=add_special_tokens)
        return token_ids(self._backend, text, add_special_tokens=add_special_tokens)

    def encode_probe(self, first: str, second: str) -> list[tuple[int, int | None, int]]:
        """Encode a trusted pair: each token, its text (None for separators), its segment."""
        found = self._backend.encode(first, second)
        return list(zip(found.ids, found.sequence_ids, found.type_ids, strict=True))

    def encode_segments(
        self, segments: Sequence[tuple[str, bool]], *, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of the joined `(text, trusted)` segments, tokenised as one text.

        Control tokens are recognised in trusted segments only. The first call builds a second copy
        of the tokenizer, which takes as long as loading it.
        """
        return self._prepared().encode(segments, add_special_tokens=add_special_tokens)

    def prepare(self) -> None:
        """Build the encoder of `encode_segments` now, so that no request waits for it."""
        self._prepared()

    def spells_control_token(self, text: str) -> bool:
        """Whether the text spells a protected token."""
        if self.protected_pattern.search(text):
            return True
        if not self.normalises_into_control:
            return False
        ids = token_ids(self._backend, text, add_special_tokens=False)
        return not self._protected_ids.isdisjoint(ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens; bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        return (data[1:] if self.strips_first_space and data[:1] == b" " else data).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token adds to a text; empty for ids outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own, for logprobs; partial characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_name(self, token_id: int) -> str | None:
        """The token's vocabulary entry, for grammars and debugging."""
        return self._backend.id_to_token(token_id)

    def token_id(self, name: str) -> int | None:
        """Id of a vocabulary entry or added token, or None."""
        return self._backend.token_to_id(name)

    def backend_json(self) -> str:
        """The whole tokenizer as tokenizer.json text, for grammar libraries."""
        return self._backend.to_str()

    def _prepared(self) -> SafeEncoder:
        with self._lock:
            if self._safe_encoder is None:
                self._safe_encoder = SafeEncoder(self._backend, self.protected)
            return self._safe_encoder

    def _compute_bytes(self, token_id: int) -> bytes:
        literal = self._added.get(token_id)
        if literal is not None and (self._rules.byte_level or token_id in self.special_ids):
            return literal.encode("utf-8", "replace")
        name = literal if literal is not None else self._backend.id_to_token(token_id)
        return b"" if name is None else self._rules.to_bytes(name)

    def _find_protected(self) -> dict[str, int]:
        # the model knows the tokens of its own templates, even if another one renders its prompts
        templates = "".join((*self.files.templates.values(), *self.chat_templates.values()))
        found = {
            text: token
            for token, text in self._added.items()
            if token in self.special_ids or (text.strip() and text in templates)
        }
        self._protected_ids = frozenset(found.values())
        # a normaliser may turn text into a control token that it does not spell yet
        entries = self._backend.get_added_tokens_decoder()
        self.normalises_into_control = self._backend.normalizer is not None and any(
            entries[token].normalized for token in found.values()
        )
        return found


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any]
) -> dict[str, str]:
    """Add tokens that only tokenizer_config.json knows; return the named ones."""
    listed = config.get("added_tokens_decoder")
    for _, entry in sorted((listed or {}).items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            flags = {k: v for k, v in entry.items() if k not in ("content", "__type")}
            backend.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])
    named = {key: text for key in _NAMED_TOKENS if (text := _content(config.get(key)))}
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    texts = [*named.values(), *filter(None, map(_content, extra))]
    known = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([text for text in dict.fromkeys(texts) if text not in known])
    return named


def _content(value: object) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _first(backend: tokenizers.Tokenizer, text: str | None, fallback: int | None) -> int | None:
    token = backend.token_to_id(text) if text else None
    return fallback if token is None else token


def _convert_slow(
    folder: Path, config: Mapping[str, Any], *, trusted: bool
) -> tokenizers.Tokenizer:
    """Let transformers convert a tokenizer without tokenizer.json.

    Uses a class in the checkpoint's code if that is trusted.
    """
    own = named_class(config, "AutoTokenizer")
    options: dict[str, Any] = {} if own and trusted else {"trust_remote_code": False}
    try:
        reader: Any = importlib.import_module("transformers").AutoTokenizer
        if own and trusted:
            reader = load_class(folder, own)
        return reader.from_pretrained(
            str(folder), local_files_only=True, **options
        ).backend_tokenizer
    except _CONVERSION_ERRORS as error:
        if own and not trusted:
            raise ConfigError(
                f"the tokenizer of {folder} is Python code of the checkpoint ({own}), {UNTRUSTED}"
            ) from error
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{folder} has no tokenizer that can be read (tokenizer.json, tokenizer.model, "
            "*.tiktoken or tekken.json), and transformers cannot make one from the other files "
            f"({type(error).__name__}: {reason[:200]})"
        ) from error
