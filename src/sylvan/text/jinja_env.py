"""A sandboxed, limited Jinja environment with the functions that chat templates expect."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 1_000_000
_OF_DICTS = frozenset(dir(dict))


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one rendering.

    Attributes:
        seconds: Maximum time; checked at each output and call.
        characters: Maximum length of the output, and of strings that a template multiplies.
    """

    seconds: float = 5.0
    characters: int = 64_000_000


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Environment for compiling templates; every rendering has a deadline.

    Compatible with transformers: `trim_blocks`, `lstrip_blocks`, `break` and `continue`,
    `{% generation %}`, `raise_exception`, `strftime_now`, and a `tojson` that does not escape HTML.

    Args:
        limits: Limits of one rendering.
        now: Local time, for templates that print the date.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, limits: RenderLimits, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.limits = limits
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in Jinja, which raises and catches an error first for each name of a dict."""
        if obj.__class__ is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function for a template, unless its time is up."""
        self.check_time(context)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operator, unless the result would be huge."""
        self.check_time(context)
        sizes = [len(x) for x in (left, right) if hasattr(x, "__len__")]
        factor = right if sizes and isinstance(right, int) else left
        if sizes and isinstance(factor, int) and sizes[0] * factor > self.limits.characters:
            raise SecurityError("the template builds a string that is too long")
        if operator == "**" and max(abs(left), abs(right)) > 10_000:
            raise SecurityError("the template computes a number that is too large")
        return super().call_binop(context, operator, left, right)

    def check_time(self, context: Context) -> None:
        """Raise if the rendering of `context` has used up its time."""
        deadline = context.get("_deadline_s")
        if isinstance(deadline, float) and time.monotonic() > deadline:
            raise SecurityError(f"the template takes longer than {self.limits.seconds:g} s")

    def run(self, source: str, variables: dict[str, Any]) -> str:
        """Render a template text.

        Raises:
            TemplateError: The template is wrong, refuses the input, or breaks a limit.
        """
        return self.render_compiled(self.from_string(source), variables)

    def render_compiled(self, template: Any, variables: dict[str, Any]) -> str:
        """As `run`, for a template made by `from_string`."""
        deadline = time.monotonic() + self.limits.seconds
        parts: list[str] = []
        size = 0
        known = {**self.globals, **variables, "_deadline_s": deadline}
        # `template.generate` would read all globals through two chained mappings
        context = self.context_class(self, known, template.name, template.blocks)
        for part in template.root_render_func(context):
            size += len(part)
            parts.append(part)
            if size > self.limits.characters:
                raise SecurityError(f"the prompt is over {self.limits.characters} characters")
            if time.monotonic() > deadline:
                raise SecurityError(f"the template takes longer than {self.limits.seconds:g} s")
        return "".join(parts)


class _GenerationTag(Extension):
    """Accepts `{% generation %} ... {% endgeneration %}`, which marks text for training."""

    tags = {"generation"}  # noqa: RUF012 - declared as a plain set by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
