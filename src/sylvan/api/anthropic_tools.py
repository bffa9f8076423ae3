"""Tools that Anthropic defines by name: client tools get the schemas of its documentation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TEXT = {"type": "string"}
_BASH: Mapping[str, Any] = {
    "description": "Run a command in a persistent shell.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {**_TEXT, "description": "The command; not needed with restart."},
            "restart": {"type": "boolean", "description": "Restart the shell."},
        },
    },
}
_EDITOR: Mapping[str, Any] = {
    "description": "View, create and edit files.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {**_TEXT, "enum": ["view", "create", "str_replace", "insert", "undo_edit"]},
            "path": {**_TEXT, "description": "File or directory."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "For view: first and last line; -1 is the end of the file.",
            },
            "file_text": {**_TEXT, "description": "For create: the content."},
            "old_str": {**_TEXT, "description": "For str_replace: text that occurs once."},
            "new_str": {**_TEXT, "description": "For str_replace and insert: the new text."},
            "insert_line": {"type": "integer", "description": "For insert: the line before."},
        },
        "required": ["command", "path"],
    },
}
_CLIENT_RUN = ((re.compile(r"bash_\d{8}"), _BASH), (re.compile(r"text_editor_\d{8}"), _EDITOR))
_SERVER_RUN = re.compile(
    r"(web_search|web_fetch|code_execution|tool_search_tool_\w+|computer|memory|mcp_toolset)(_\d{8})?"
)


def client_run(kind: str) -> Mapping[str, Any] | None:
    """Return description and parameters of a client tool; None: unknown."""
    return next((tool for pattern, tool in _CLIENT_RUN if pattern.fullmatch(kind)), None)


def is_built_in(kind: str) -> bool:
    """Whether this is one of Anthropic's server tools, which the model here is not offered."""
    return _SERVER_RUN.fullmatch(kind) is not None
