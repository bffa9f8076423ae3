"""Structural tags: free text in which some parts are constrained.

The old form lists `structures` and `triggers`; the new one is a tree under `format`. Both become
the tree; libraries without structural tags of their own get it as a Lark grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.spec import GrammarSpec

Node = Mapping[str, Any]

_ANY_TEXT = r"(.|\n)*"
_SLASHES = re.compile(r"\\.|/|\n", re.DOTALL)


def tree_of(spec: GrammarSpec) -> Node:
    """The `format` tree of a structural tag in either form.

    Raises:
        RequestError: it has neither form.
    """
    value = spec.json()
    if not isinstance(value, dict):
        raise _wrong("structural_tag", "must be an object")
    if isinstance(value.get("format"), dict):
        return value["format"]
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise _wrong("structural_tag", "needs `format`, or `structures` and `triggers`")
    tags = [_old_tag(tag, f"structures[{i}]") for i, tag in enumerate(structures)]
    if not tags or not triggers:
        raise _wrong("structural_tag", "needs at least one structure and one trigger")
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "at_least_one": bool(value.get("at_least_one", False)),
        "stop_after_first": bool(value.get("stop_after_first", False)),
    }


def literal(text: str, special: Mapping[str, int]) -> str:
    """A Lark expression for `text`, in which control tokens are meant where they are spelt."""
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
    """The strings of a choice.

    Raises:
        RequestError: it is not a list of different strings.
    """
    value = spec.json()
    if not isinstance(value, list) or not value or not all(isinstance(s, str) for s in value):
        raise RequestError("choice must be a list of at least one string", param="choice")
    return list(dict.fromkeys(value))


def escape_slashes(regex: str) -> str:
    """A regex as it may stand between the slashes of a Lark grammar."""
    return _SLASHES.sub(lambda m: {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(m[0], m[0]), regex)


class LarkWriter:
    """Writes a tree of structural tags as a grammar of llguidance.

    Args:
        special: Control tokens by name.
        ebnf: Turns an EBNF grammar into a Lark grammar; raises RequestError.
    """

    def __init__(self, special: Mapping[str, int], ebnf: Callable[[str], str]) -> None:
        self._special = special
        self._ebnf = ebnf
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

    def write(self, tree: Node) -> str:
        """The grammar of a whole output."""
        start = self._expression(tree, "format")
        main = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        if not self._others:
            return main
        grammars = [{"name": "main", "lark_grammar": main}]
        grammars += [{"name": f"g{i}", "lark_grammar": g} for i, g in enumerate(self._others)]
        return json.dumps({"grammars": grammars})

    def _expression(self, node: object, at: str) -> str:
        if not isinstance(node, dict):
            raise _wrong(at, "must be an object")
        write = self._kinds.get(node.get("type", ""))
        if write is None:
            raise _wrong(f"{at}.type", f"{node.get('type')!r} is not supported by this backend")
        return write(node, at)

    def _rule(self, expression: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def _literal(self, text: str) -> str:
        return literal(text, self._special)

    def _json_schema(self, node: Node, at: str) -> str:
        if node.get("style", "json") != "json":
            raise _wrong(f"{at}.style", f"{node['style']!r} is not supported by this backend")
        schema = node.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise _wrong(f"{at}.json_schema", "must be a JSON schema")
        return self._rule(f"%json {json.dumps({} if schema is True else schema)}")

    def _regex(self, node: Node, at: str) -> str:
        return self._rule(f"/{escape_slashes(_string(node, 'pattern', at))}/")

    def _grammar(self, node: Node, at: str) -> str:
        self._others.append(self._ebnf(_string(node, "grammar", at)))
        return f"@g{len(self._others) - 1}"

    def _any_text(self, node: Node, at: str) -> str:
        excludes = _strings(node.get("excludes", []), f"{at}.excludes")
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
            raise _wrong(f"{at}.token", f"{token!r} is not a control token of this model")
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
                written.append(self._until(_string(after, "value", f"{at}.elements[{i + 1}]")))
                skip = True
            else:
                written.append(self._expression(part, f"{at}.elements[{i}]"))
        return " ".join(f"({part})" for part in written) or '""'

    def _any(self, node: Node, key: str, at: str) -> str:
        parts = _nodes(node, key, at)
        written = [self._expression(part, f"{at}.{key}[{i}]") for i, part in enumerate(parts)]
        return f"({' | '.join(written)})"

    def _content(self, node: Node, at: str) -> str:
        return self._expression(node.get("content"), f"{at}.content")

    def _until(self, end: str) -> str:
        """Any text up to the first `end`."""
        if any(name and name in end for name in self._special):
            return f"TEXT {self._literal(end)}"
        return self._rule(f"TEXT {self._literal(end)}", "[lazy]")

    def _tag(self, node: Node, at: str, skip: int = 0) -> str:
        """The tag without the first `skip` characters of its begin."""
        begin = node.get("begin")
        if isinstance(begin, dict):
            written = self._token(begin, f"{at}.begin")
        else:
            rest = _string(node, "begin", at)[skip:]
            written = self._literal(rest) if rest else '""'
        content, end = node.get("content"), node.get("end", "")
        if isinstance(content, dict) and _is_text(content) and isinstance(end, str) and end:
            return self._rule(f"{written} {self._until(end)}")
        if isinstance(end, dict):
            closing = self._token(end, f"{at}.end")
        else:
            ends = [end] if isinstance(end, str) else _strings(end, f"{at}.end")
            closing = f"({' | '.join(map(self._literal, ends))})"
        return self._rule(f"{written} {self._content(node, at)} {closing}")

    def _triggered(self, node: Node, at: str) -> str:
        triggers = _strings(node.get("triggers"), f"{at}.triggers")
        tags = _nodes(node, "tags", at)
        groups: dict[str, list[str]] = {}
        for i, tag in enumerate(tags):
            path = f"{at}.tags[{i}]"
            begin = _string(tag, "begin", path)
            trigger = max((t for t in triggers if begin.startswith(t)), key=len, default=None)
            if not trigger:
                raise _wrong(f"{path}.begin", f"{begin!r} starts with none of the triggers")
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
        least, most = node.get("min"), node.get("max")
        if not isinstance(least, int) or not isinstance(most, int) or least < 0:
            raise _wrong(at, "needs `min` and `max`")
        return f"({self._content(node, at)}){{{least},{most if most >= 0 else ''}}}"


def _old_tag(tag: object, at: str) -> Node:
    if not isinstance(tag, dict) or not isinstance(tag.get("schema", {}), dict | bool | str):
        raise _wrong(at, "needs `begin`, `schema` and `end`")
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
        raise _wrong(f"{at}.{key}", "must be a list of at least one object")
    return found


def _strings(value: object, at: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(s, str) for s in value):
        raise _wrong(at, "must be a list of strings")
    return value


def _string(node: Node, key: str, at: str) -> str:
    value = node.get(key)
    if not isinstance(value, str):
        raise _wrong(f"{at}.{key}", "must be a string")
    return value


def _wrong(at: str, why: str) -> RequestError:
    path = at if at.startswith("structural_tag") else f"structural_tag.{at}"
    return RequestError(f"{path} {why}", param="structural_tag")
