"""Lark's notation and llama.cpp's: detection, and escapes that only one of them has."""

from __future__ import annotations

import pytest

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.notations import is_lark, with_plain_escapes
from sylvan.runtime.features.grammar.spec import GrammarSpec
from tests.support.grammar import accept, make_backend

# The beginnings of lark-parser/lark's examples: calc.py, json_parser.py and grammars/lark.lark.
CALC = """
?start: sum
      | NAME "=" sum    -> assign_var
?sum: product
    | sum "+" product   -> add
?product: atom
    | product "*" atom  -> mul
?atom: NUMBER           -> number
     | NAME             -> var
     | "(" sum ")"
NAME: /[a-z]+/
NUMBER: /[0-9]+/
"""
JSON_PARSER = """
?start: value
?value: object
      | array
      | string
      | "true"             -> true
array  : "[" [value ("," value)*] "]"
object : "{" [pair ("," pair)*] "}"
pair   : string ":" value
string : ESCAPED_STRING
ESCAPED_STRING: /"[^"]*"/
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALC, True),
        (JSON_PARSER, True),
        ("start: /a/", True),
        ("!start: A\nA: /a/", True),
        ('%llguidance {}\nstart: "::="', True),
        ('start: "a" // root ::= b', True),
        ('root ::= "start: a"', False),
        ('# start: a\nroot ::= [a-z]+ ":" x\nx ::= "y"', False),
        ("root::=[a]", False),
        ("nonsense", False),
    ],
)
def test_notations_are_distinguished_by_their_rules(text, expected) -> None:
    assert is_lark(text) is expected


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [(CALC, "x=1+(2*y)", "x=="), (JSON_PARSER, '{"a":[true,"b"]}', "{]")],
)
def test_grammars_of_lark_itself_are_taken(grammar, good, bad) -> None:
    compiled = make_backend("llguidance").compile(GrammarSpec("ebnf", grammar))

    matcher = compiled.matcher()
    assert accept(matcher, good.encode())
    assert matcher.is_accepting()
    assert not accept(compiled.matcher(), bad.encode())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'root ::= "\u00e9\U0001F600\u0041"', 'root ::= "\\xe9\U0001f600\\x41"'),
        (r"root ::= [\u4e00-\u9fff\]]", "root ::= [一-鿿\\]]"),
        (r'root ::= "\\u00e9"', r'root ::= "\\u00e9"'),
        (r'root ::= "\"" # \ud800', r'root ::= "\"" # \ud800'),
        (r'root ::= "\x0a\n"', r'root ::= "\x0a\n"'),
    ],
)
def test_escapes_become_what_lark_has(text, expected) -> None:
    assert with_plain_escapes(text) == expected


@pytest.mark.parametrize("escape", [r"\ud800", r"\U00110000"])
def test_an_escape_of_no_character_is_refused_with_its_line(escape) -> None:
    with pytest.raises(RequestError) as caught:
        with_plain_escapes(f'root ::= a\na ::= "{escape}"')

    assert str(caught.value) == f"ebnf: at line 2: {escape} is not a character"
