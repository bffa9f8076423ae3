"""Structural tags: free text with constrained parts.

The old format lists `structures` and `triggers`; the new one is a tree under `format`. Both are
converted to the tree; libraries without structural tags get it as a Lark grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.schema import pointer
from sylvan.runtime.features.grammar.spec import GrammarSpec, NotSupportedError

Node = Mapping[str, Any]

_ANY_TEXT = r"(.|\n)*"
_SLASHES = re.compile(r"\\.|/|\n", re.DOTALL)
_LEAVES = {
    "json_schema": ("json_schema", "json_schema"),
    "qwen_xml_parameter": ("json_schema", "json_schema"),
    "regex": ("pattern", "regex"),
    "grammar": ("grammar", "ebnf"),
}
"""Nodes that contain a grammar: under which key, and of which kind."""
_BEYOND = {"any_order": False, "max_chars": None, "max_tokens": None, "max_whitespace_cnt": None}
"""Keys without an equivalent in Lark grammars, with the values that have no effect."""
_TAG = re.compile(r"#/format/tags/(\d+)(/content/json_schema)?")


def tree_of(spec: GrammarSpec) -> Node:
    """Return the `format` tree of a structural tag in either format.

    Raises:
        RequestError: It has neither format.
    """
    value = spec.json()
    if not isinstance(value, dict):
        raise RequestError("structural_tag must be an object", param="structural_tag")
    if isinstance(value.get("format"), dict):
        return value["format"]
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise _invalid("#", "needs `format`, or `structures` and `triggers`")
    tags = [_old_tag(tag, pointer("#/structures", i)) for i, tag in enumerate(structures)]
    if not tags or not triggers:
        raise _invalid("#", "needs at least one structure and one trigger")
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "at_least_one": bool(value.get("at_least_one", False)),
        "stop_after_first": bool(value.get("stop_after_first", False)),
    }


def leaves(node: Any, at: str = "#/format") -> Iterator[tuple[str, GrammarSpec]]:
    """Return the grammars in a tree, with their places."""
    if isinstance(node, list):
        for i, part in enumerate(node):
            yield from leaves(part, pointer(at, i))
    elif isinstance(node, dict):
        known = _LEAVES.get(str(node.get("type")))
        if known is None:
            for key, part in node.items():
                yield from leaves(part, pointer(at, key))
            return
        value = node.get(known[0])
        text = value if isinstance(value, str) and known[1] != "json_schema" else json.dumps(value)
        yield pointer(at, known[0]), GrammarSpec(known[1], text)


def with_leaves(node: Any, change: Callable[[Node, str], Node], at: str = "#/format") -> Any:
    """Return the tree with replaced grammar nodes; `change` gets them and their places."""
    if isinstance(node, list):
        return [with_leaves(part, change, pointer(at, i)) for i, part in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if str(node.get("type")) in _LEAVES:
        return change(node, at)
    return {key: with_leaves(part, change, pointer(at, key)) for key, part in node.items()}


def within(tags: GrammarSpec, at: str, kind: str, message: str) -> str:
    """Map an error in a nested grammar to its place in the structural tags.

    Args:
        tags: The structural tags.
        at: Place of the grammar in their tree.
        kind: Kind of the grammar.
        message: Starts with `kind`, then the place, if any.
    """
    rest = message.removeprefix(kind)
    joined = at + rest.removeprefix(": #") if rest.startswith(": #") else at + rest
    return f"structural_tag: {as_written(tags, joined)}"


def as_written(tags: GrammarSpec, message: str) -> str:
    """Map the places in a message to the old format, if the tags use it."""
    value = tags.json()
    if isinstance(value, dict) and isinstance(value.get("format"), dict):
        return message
    return _TAG.sub(lambda m: f"#/structures/{m[1]}" + ("/schema" if m[2] else ""), message)


def literal(text: str, special: Mapping[str, int]) -> str:
    """Return a Lark expression for `text`; names of control tokens denote the tokens."""
    names = [name for name in special if name and name in text]
    if not names:
        return json.dumps(text, ensure_ascii=False)
    split = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    parts: list[str] = []
    at = 0
    for found in split.finditer(text):
        if found.start() > at:
            parts.append(json.dumps(text[at : found.start()], ensure_ascii=False))
        parts.append(f"<[{special[found.group()]}]>")
        at = found.end()
    if at < len(text):
        parts.append(json.dumps(text[at:], ensure_ascii=False))
    return " ".join(parts)


def choices(spec: GrammarSpec) -> list[str]:
    """Return the strings of a choice.

    Raises:
        RequestError: It is not a list of distinct strings.
    """
    value = spec.json()
    if not isinstance(value, list) or not value or not all(isinstance(s, str) for s in value):
        raise RequestError("choice must be a list of at least one string", param="choice")
    return list(dict.fromkeys(value))


def escape_slashes(regex: str) -> str:
    """Escape a regex for the slashes of a Lark grammar."""
    return _SLASHES.sub(lambda m: {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(m[0], m[0]), regex)


class LarkWriter:
    """Writes a tree of structural tags as an llguidance grammar.

    Args:
        special: Control tokens by name.
        ebnf: Converts an EBNF grammar to a Lark grammar; raises RequestError.
        schema: Checks a JSON schema, and adds its compile options; raises RequestError.
    """

    def __init__(
        self,
        special: Mapping[str, int],
        ebnf: Callable[[str], str],
        schema: Callable[[GrammarSpec], str],
    ) -> None:
        self._special = special
        self._ebnf, self._schema = ebnf, schema
        self._spec = GrammarSpec("structural_tag", "{}")
        self._rules: list[str] = [f"TEXT: /{_ANY_TEXT}/"]
        self._others: list[str] = []
        self._kinds: Mapping[str, Callable[[Node, str], str]] = {
            "const_string": lambda node, at: self._literal(_string(node, "value", at)),
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "token": self._token,
            "sequence": self._sequence,
            "or": lambda node, at: self._any(node, "elements", at),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
            "optional": lambda node, at: f"({self._content(node, at)})?",
            "plus": lambda node, at: f"({self._content(node, at)})+",
            "star": lambda node, at: f"({self._content(node, at)})*",
            "repeat": self._repeat,
        }

    def write(self, spec: GrammarSpec) -> str:
        """Return the grammar of a whole output.

        Raises:
            RequestError: The message names the place.
        """
        self._spec = spec
        try:
            start = self._expression(tree_of(spec), "#/format")
        except RequestError as error:
            raise type(error)(as_written(spec, str(error)), param="structural_tag") from None
        main = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        if not self._others:
            return main
        grammars = [{"name": "main", "lark_grammar": main}]
        grammars += [{"name": f"g{i}", "lark_grammar": g} for i, g in enumerate(self._others)]
        return json.dumps({"grammars": grammars})

    def _expression(self, node: object, at: str) -> str:
        if not isinstance(node, dict):
            raise _invalid(at, "must be an object")
        write = self._kinds.get(str(node.get("type")))
        if write is None:
            raise _not_supported(pointer(at, "type"), repr(node.get("type")))
        for key, usual in _BEYOND.items():
            if node.get(key, usual) != usual:
                raise _not_supported(pointer(at, key))
        return write(node, at)

    def _rule(self, expression: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def _literal(self, text: str) -> str:
        return literal(text, self._special)

    def _json_schema(self, node: Node, at: str) -> str:
        for key, usual in (("style", "json"), ("excludes", [])):
            if node.get(key, usual) != usual:
                raise _not_supported(pointer(at, key), repr(node[key]))
        if not isinstance(node.get("json_schema"), dict | bool):
            raise _invalid(pointer(at, "json_schema"), "must be a JSON schema")
        return self._rule(f"%json {self._leaf(node, at, self._schema)}")

    def _regex(self, node: Node, at: str) -> str:
        return self._rule(f"/{escape_slashes(_string(node, 'pattern', at))}/")

    def _grammar(self, node: Node, at: str) -> str:
        _string(node, "grammar", at)
        self._others.append(self._leaf(node, at, lambda spec: self._ebnf(spec.text)))
        return f"@g{len(self._others) - 1}"

    def _leaf(self, node: Node, at: str, read: Callable[[GrammarSpec], str]) -> str:
        place, leaf = next(leaves(node, at))
        try:
            return read(leaf)
        except RequestError as error:
            raise type(error)(within(self._spec, place, leaf.kind, str(error))) from None

    def _any_text(self, node: Node, at: str) -> str:
        excludes = _strings(node.get("excludes", []), pointer(at, "excludes"))
        if not excludes:
            return "TEXT"
        words = "|".join(escape_slashes(re.escape(word)) for word in excludes)
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: /{_ANY_TEXT}/ & ~/{_ANY_TEXT}({words}){_ANY_TEXT}/")
        return name

    def _token(self, node: Node, at: str) -> str:
        token = node.get("token")
        found = self._special.get(token) if isinstance(token, str) else token
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise _invalid(pointer(at, "token"), f"{token!r} is not a control token of this model")
        return f"<[{found}]>"

    def _sequence(self, node: Node, at: str) -> str:
        parts = _nodes(node, "elements", at)
        written: list[str] = []
        skip = False
        for i, part in enumerate(parts):
            after = parts[i + 1] if i + 1 < len(parts) else None
            if skip:
                skip = False
            elif _is_text(part) and after and after.get("type") == "const_string":
                written.append(self._until(_string(after, "value", pointer(at, "elements", i + 1))))
                skip = True
            else:
                written.append(self._expression(part, pointer(at, "elements", i)))
        return " ".join(f"({part})" for part in written) or '""'

    def _any(self, node: Node, key: str, at: str) -> str:
        parts = _nodes(node, key, at)
        written = [self._expression(part, pointer(at, key, i)) for i, part in enumerate(parts)]
        return f"({' | '.join(written)})"

    def _content(self, node: Node, at: str) -> str:
        return self._expression(node.get("content"), pointer(at, "content"))

    def _until(self, end: str) -> str:
        """Return any text up to the first `end`."""
        if any(name and name in end for name in self._special):
            return f"TEXT {self._literal(end)}"
        return self._rule(f"TEXT {self._literal(end)}", "[lazy]")

    def _tag(self, node: Node, at: str, skip: int = 0) -> str:
        """Return the tag without the first `skip` characters of its begin."""
        begin = node.get("begin")
        if isinstance(begin, dict):
            written = self._token(begin, pointer(at, "begin"))
        else:
            rest = _string(node, "begin", at)[skip:]
            written = self._literal(rest) if rest else '""'
        content, end = node.get("content"), node.get("end", "")
        if isinstance(content, dict) and _is_text(content) and isinstance(end, str) and end:
            return self._rule(f"{written} {self._until(end)}")
        if isinstance(end, dict):
            closing = self._token(end, pointer(at, "end"))
        else:
            ends = [end] if isinstance(end, str) else _strings(end, pointer(at, "end"))
            closing = f"({' | '.join(map(self._literal, ends))})"
        return self._rule(f"{written} {self._content(node, at)} {closing}")

    def _triggered(self, node: Node, at: str) -> str:
        triggers = _strings(node.get("triggers"), pointer(at, "triggers"))
        tags = _nodes(node, "tags", at)
        groups: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            path = pointer(at, "tags", i)
            begin = _string(tag, "begin", path)
            trigger = max((t for t in triggers if begin.startswith(t)), key=len, default=None)
            if not trigger:
                raise _invalid(
                    pointer(path, "begin"), f"{begin!r} starts with none of the triggers"
                )
            groups.setdefault(trigger, []).append(self._tag(tag, path, len(trigger)))
        later = self._rule(
            " | ".join(f"{self._until(t)} ({' | '.join(rules)})" for t, rules in groups.items())
        )
        if not node.get("at_least_one"):
            return f"({later})? TEXT" if node.get("stop_after_first") else f"({later})* TEXT"
        first = self._any(node, "tags", at)
        return first if node.get("stop_after_first") else f"{first} ({later})* TEXT"

    def _separated(self, node: Node, at: str) -> str:
        tags = self._rule(self._any(node, "tags", at))
        separator = self._literal(_string(node, "separator", at))
        more = "" if node.get("stop_after_first") else f" ({separator} {tags})*"
        return f"({tags}{more}){'' if node.get('at_least_one') else '?'}"

    def _repeat(self, node: Node, at: str) -> str:
        least, limit = node.get("min"), node.get("max")
        if not isinstance(least, int) or not isinstance(limit, int) or least < 0:
            raise _invalid(at, "needs `min` and `max`")
        return f"({self._content(node, at)}){{{least},{limit if limit >= 0 else ''}}}"


def _old_tag(tag: object, at: str) -> Node:
    if not isinstance(tag, dict) or not isinstance(tag.get("schema", {}), dict | bool | str):
        raise _invalid(at, "needs `begin`, `schema` and `end`")
    schema = tag.get("schema", {})
    if isinstance(schema, str):
        schema = GrammarSpec("structural_tag", schema).json()
    return {
        "type": "tag",
        "begin": _string(tag, "begin", at),
        "content": {"type": "json_schema", "json_schema": schema},
        "end": _string(tag, "end", at),
    }


def _is_text(node: Node) -> bool:
    return node.get("type") == "any_text" and not node.get("excludes")


def _nodes(node: Node, key: str, at: str) -> Sequence[Node]:
    found = node.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(n, dict) for n in found):
        raise _invalid(pointer(at, key), "must be a list of at least one object")
    return found


def _strings(value: object, at: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(s, str) for s in value):
        raise _invalid(at, "must be a list of strings")
    return value


def _string(node: Node, key: str, at: str) -> str:
    value = node.get(key)
    if not isinstance(value, str):
        raise _invalid(pointer(at, key), "must be a string")
    return value


def _invalid(at: str, why: str) -> RequestError:
    return RequestError(f"structural_tag: {at} {why}", param="structural_tag")


def _not_supported(at: str, what: str = "") -> NotSupportedError:
    message = f"structural_tag: {at} {what}".rstrip() + " is not supported by grammar.backend"
    return NotSupportedError(f"{message} llguidance", param="structural_tag")
