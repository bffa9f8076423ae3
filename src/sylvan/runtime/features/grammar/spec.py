"""A client's grammar, and limits checked before any library sees it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.utils import strict_json

ANY_JSON = "$$ANY$$"
KINDS = ("json_schema", "regex", "ebnf", "structural_tag", "choice")
MAX_TEXT_BYTES = 4 << 20
MAX_DEPTH = 128

_JSON_KINDS = frozenset({"json_schema", "structural_tag", "choice"})
_JSON_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_OTHER_MARKS = re.compile(r"\\.|[()\[\]{}]", re.DOTALL)


class NotSupportedError(RequestError):
    """The grammar may be valid, but the library does not support it."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """Kind (of `KINDS`) and text of a grammar.

    The text is JSON for a schema, a structural tag and a choice (a list of strings). `exact`:
    reject a schema that the grammar alone cannot enforce.
    """

    kind: str
    text: str
    exact: bool = False

    @property
    def digest(self) -> str:
        """Hash of the content."""
        kind = f"exact {self.kind}" if self.exact else self.kind
        return hashlib.sha256(f"{kind}\n{self.text}".encode()).hexdigest()

    def json(self) -> Any:
        """Parse the text; `$$ANY$$` is the schema of any JSON value.

        Raises:
            RequestError: It is not JSON.
        """
        if self.kind == "json_schema" and self.text == ANY_JSON:
            return {}
        try:
            return strict_json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{self.kind} is not valid JSON: {error}", param=self.kind) from None


def spec_of(request: GenerateRequest | EmbedRequest) -> GrammarSpec | None:
    """The grammar that constrains a request, if any."""
    if not isinstance(request, GenerateRequest) or request.sampling.grammar is None:
        return None
    kind, text = request.sampling.grammar
    return GrammarSpec(kind, text, exact=request.sampling.strict_grammar)


def check_limits(spec: GrammarSpec) -> None:
    """Check `check_size` and `check_depth`."""
    check_size(spec)
    check_depth(spec)


def check_size(spec: GrammarSpec) -> None:
    """Reject what is too large for libraries. Takes microseconds.

    Raises:
        RequestError: The message names the limit.
    """
    size = len(spec.text.encode("utf-8", "surrogatepass"))
    if size > MAX_TEXT_BYTES:
        message = f"{spec.kind} has {size} bytes; at most {MAX_TEXT_BYTES} are allowed"
        raise RequestError(message, param=spec.kind)
    if "\0" in spec.text:
        raise RequestError(f"{spec.kind} contains a NUL character", param=spec.kind)


def check_depth(spec: GrammarSpec) -> None:
    """Reject what is nested too deeply for recursive libraries. Parses the text.

    Raises:
        RequestError: The message names the limit.
    """
    depth = deepest = 0
    marks = _JSON_MARKS if spec.kind in _JSON_KINDS else _OTHER_MARKS
    for found in marks.finditer(spec.text):
        mark = found.group()
        if mark in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in ")]}":
            depth -= 1
    if deepest > MAX_DEPTH:
        message = f"{spec.kind} is nested {deepest} deep; at most {MAX_DEPTH} are allowed"
        raise RequestError(message, param=spec.kind)
