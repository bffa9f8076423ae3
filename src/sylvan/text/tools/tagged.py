"""Structural tags for call formats whose arguments stand between tags.

Such a model writes each argument as text: strings as they are, everything else as JSON. A schema
can be enforced if this form suffices to express it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sylvan.text.tools.references import moved, refers, resolved
from sylvan.text.tools.values import allowed_types, to_json

Node = dict[str, Any]

_NAME = re.compile(r"[\w.$-]+")
_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
_NOTES |= {"$comment", "$schema", "$id"}
_ROOT = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_STRING = frozenset({"string"})


class Inexpressible(ValueError):  # noqa: N818 - says what it is
    """A schema that the call format cannot enforce; the message says where and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagWrapping:
    """Format of a call with tags.

    Attributes:
        begin: Text before the arguments, with `NAME` for the function.
        key: Text before a value, with `KEY` for its name, and `TEXT` for whether it is a string
          ("true" or "false"), if the model says so.
        close: Text after a value.
        end: Text that ends the call.
        trigger: Prefix of `begin` after which the output is constrained.
    """

    begin: str
    key: str
    close: str
    end: str
    trigger: str

    def tag(self, name: str, parameters: Mapping[str, Any]) -> Node:
        """A call of a function whose arguments follow the schema; keys keep its order.

        Raises:
            Inexpressible: this call format cannot enforce the schema.
        """
        if not _NAME.fullmatch(name):
            raise Inexpressible(f"its name {name!r} cannot be written in a tag")
        _only(parameters, _ROOT, "#")
        if parameters.get("type", "object") != "object":
            raise Inexpressible("#/type is not object")
        properties = parameters.get("properties", {})
        required = parameters.get("required", [])
        if missing := [key for key in required if key not in properties]:
            raise Inexpressible(f"#/required names {missing[0]!r}, which has no schema")
        parts: list[Node] = []
        for key, schema in properties.items():
            part = self._argument(key, schema, parameters)
            parts.append(part if key in required else {"type": "optional", "content": part})
        parts.append(_text(self.end))
        return {
            "type": "tag",
            "begin": self.begin.replace("NAME", name),
            "content": {"type": "sequence", "elements": parts},
            "end": "",
        }

    def free(self, name: str) -> Node:
        """A call of a function with any arguments."""
        head = self.begin.replace("NAME", name)
        if not head.endswith("\n"):  # terminate the name
            head += self.key.partition("KEY")[0]
        end = self.end.rpartition("\n")[2]
        return {"type": "tag", "begin": head, "content": {"type": "any_text"}, "end": end}

    def _argument(self, key: str, schema: object, root: Mapping[str, Any]) -> Node:
        at = f"#/properties/{key}"
        if not _NAME.fullmatch(key):
            raise Inexpressible(f"{at}: this name cannot be written in a tag")
        if not isinstance(schema, Mapping):
            schema = _boolean(schema, at)
        target = _resolved(schema, root, at)
        kinds = allowed_types(target)
        is_text = "string" in kinds
        content = self._string(target, kinds, at) if is_text else _json(schema, root)
        begin = self.key.replace("KEY", key).replace("TEXT", "true" if is_text else "false")
        return {"type": "tag", "begin": begin, "content": content, "end": self.close}

    def _string(self, schema: Mapping[str, Any], kinds: frozenset[str], at: str) -> Node:
        if _is_plain(schema):
            return {"type": "any_text"}
        if "TEXT" in self.key:
            kinds = _STRING
        _only(schema, _NOTES | {"type", "enum", "const", "pattern"}, at)
        if "enum" in schema or "const" in schema:
            _only(schema, _NOTES | {"type", "enum", "const"}, at)
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return _any([_text(_written(value, kinds, at)) for value in values], at)
        pattern = schema["pattern"]
        whole = isinstance(pattern, str) and pattern.startswith("^") and pattern.endswith("$")
        if kinds != _STRING or not whole or pattern.endswith("\\$") or "|" in pattern:
            raise Inexpressible(f"{at}/pattern can be held only as ^...$ without |, of a string")
        return {"type": "regex", "pattern": pattern[1:-1]}


def tag_wrappings() -> list[tuple[str, TagWrapping]]:
    """Call formats by the names of families.

    The first family of a line has a template that shows the format; the others share its parser.
    """
    glm = TagWrapping(
        begin="<tool_call>NAME\n",
        key="<arg_key>KEY</arg_key>\n<arg_value>",
        close="</arg_value>\n",
        end="</tool_call>",
        trigger="<tool_call>",
    )
    found = [
        (
            "qwen3_coder step3p5 nanbeige mimo",
            TagWrapping(
                begin="<tool_call>\n<function=NAME>\n",
                key="<parameter=KEY>\n",
                close="\n</parameter>\n",
                end="</function>\n</tool_call>",
                trigger="<tool_call>",
            ),
        ),
        ("glm glm45 ling3 poolside_v1", glm),
        ("spark25", replace(glm, key="<arg_key>KEY</arg_key><arg_value>", close="</arg_value>")),
        (
            "glm47",
            replace(
                glm,
                begin="<tool_call>NAME",
                key="<arg_key>KEY</arg_key><arg_value>",
                close="</arg_value>",
            ),
        ),
        (
            "minimax-m2",
            TagWrapping(
                begin='<minimax:tool_call>\n<invoke name="NAME">\n',
                key='<parameter name="KEY">',
                close="</parameter>\n",
                end="</invoke>\n</minimax:tool_call>",
                trigger="<minimax:tool_call>",
            ),
        ),
    ]
    tag = "\uff5cDSML\uff5c"  # between full-width bars
    for name, section in (("deepseekv32", "function_calls"), ("deepseekv4", "tool_calls")):
        dsml = TagWrapping(
            begin=f'<{tag}{section}>\n<{tag}invoke name="NAME">\n',
            key=f'<{tag}parameter name="KEY" string="TEXT">',
            close=f"</{tag}parameter>\n",
            end=f"</{tag}invoke>\n</{tag}{section}>",
            trigger=f"<{tag}{section}>",
        )
        found.append((name, dsml))
    return found


def _boolean(schema: object, at: str) -> Mapping[str, Any]:
    if schema is not True:
        raise Inexpressible(f"{at} allows no value")
    return {}


def _json(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Node:
    found = dict(schema)
    if refers(schema):
        place = "#/$defs/arguments"
        found = {**moved(schema, place), "$defs": {"arguments": moved(root, place)}}
    return {"type": "json_schema", "json_schema": found}


def _written(value: object, kinds: frozenset[str], at: str) -> str:
    """The text that parses to `value`."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not text or text != text.strip() or json.loads(to_json(text, kinds)) != value:
        raise Inexpressible(f"{at}: {json.dumps(value)[:80]} cannot be written between tags")
    return text


def _is_plain(schema: object) -> bool:
    """Whether a schema only restricts types."""
    if not isinstance(schema, Mapping):
        return schema is True
    options = schema.get("anyOf", [])
    rest = set(schema) - _NOTES - {"type", "anyOf"}
    return not rest and not ("type" in schema and options) and all(map(_is_plain, options))


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any], at: str) -> Mapping[str, Any]:
    """The schema behind a reference."""
    found = resolved(schema, root)
    if found is None:
        raise Inexpressible(f"{at}/$ref leads to no schema")
    return found


def _only(schema: Mapping[str, Any], known: frozenset[str], at: str) -> None:
    if others := [key for key in schema if key not in known]:
        raise Inexpressible(f"{at}/{others[0]} cannot be held there")


def _any(nodes: list[Node], at: str) -> Node:
    if not nodes:
        raise Inexpressible(f"{at} allows no value")
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}


def _text(text: str) -> Node:
    return {"type": "const_string", "value": text}
