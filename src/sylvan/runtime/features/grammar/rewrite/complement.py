r"""Regexes that match all strings except some: libraries have no look-around.

The excluded strings form a trie; a string differs from all of them where it leaves the trie, or
ends inside it. Characters are written such that every regex dialect reads them
literally.
"""

from __future__ import annotations

from collections.abc import Iterable

_ANY = r"[\s\S]"
_Tree = dict[str, "_Tree"]
_END = ""  # marks the end of a string; no character is empty


def other_than(strings: Iterable[str]) -> str:
    """Return a regex for all strings except these."""
    return f"^{_leaving(_tree(strings), prefixes=False)}$"


def not_beginning_with(prefixes: Iterable[str]) -> str:
    """Return a regex for all strings that start with none of these."""
    tree = _tree(prefixes)
    return f"^{_leaving(tree, prefixes=True)}$" if _END not in tree else "^[^\\s\\S]$"


def _tree(strings: Iterable[str]) -> _Tree:
    root: _Tree = {}
    for string in strings:
        node = root
        for character in string:
            node = node.setdefault(character, {})
        node[_END] = {}
    return root


def _leaving(root: _Tree, *, prefixes: bool) -> str:
    """Return a regex for what leaves the trie; built from the leaves up: names can be long."""
    order = [root]
    for node in order:
        order += [child for key, child in node.items() if key]
    written: dict[int, str] = {}
    for node in reversed(order):
        nexts = [key for key in node if key and not (prefixes and _END in node[key])]
        banned = [key for key in node if key]
        if not banned:
            written[id(node)] = f"{_ANY}+"
            continue
        ways = [f"[^{''.join(map(_written, banned))}]{_ANY}*"]
        ways += [_written(key) + written[id(node[key])] for key in nexts]
        optional = "" if _END in node else "?"
        written[id(node)] = f"(?:{'|'.join(ways)}){optional}"
    return written[id(root)]


def _written(character: str) -> str:
    if character.isalnum() or ord(character) > 0x7F:
        return character
    return f"\\x{ord(character):02x}"
