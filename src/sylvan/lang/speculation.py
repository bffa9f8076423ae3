"""API speculation: one long call serves several `gen` calls (SGLang, arXiv:2312.07104 s3.3).

A service without a prefix cache bills and computes the prompt on every call. So the first call
requests more than its `gen` needs, and the surplus is matched against the program's next texts and
gens. The result of a gen never differs in kind from a call of its own: if the surplus does not show
where a gen would have ended, it is dropped and a call is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sylvan.lang.errors import BackendError
from sylvan.lang.sampling import GenParams, as_list

MAX_TRIES = 3

Call = Callable[[GenParams], tuple[Any, dict[str, Any]]]
Results = list[tuple[str | None, str]]  # (variable or None for the program's text, text)


class StateSpeculation(Protocol):
    """Handles texts and gens of a state during speculation."""

    def fill(self, text: str, *, of_message: bool) -> bool:
        """Handle a text of the program; True if it must not be appended now."""
        ...

    def gen(self, name: str | None, params: GenParams) -> tuple[Any, dict[str, Any]] | None:
        """Text and meta info of a gen; None if `end_message` returns them."""
        ...

    def end_message(self) -> Results:
        """Texts that were deferred to the end of the message."""
        ...


def find_stop(text: str, stops: list[str]) -> int:
    """Position of the earliest stop string; -1 if there is none."""
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    return min(found, default=-1)


class CompletionSpeculation:
    """For services that continue a text: matches the surplus as the program continues."""

    def __init__(self, num_tokens: int, call: Call) -> None:
        self._num_tokens = num_tokens
        self._call = call
        self._surplus = ""
        self._ended = False  # the model ended its text after the surplus

    def fill(self, text: str, *, of_message: bool) -> bool:
        del of_message
        matches = bool(self._surplus) and self._surplus.startswith(text)
        self._surplus = self._surplus[len(text) :] if matches else ""
        return False

    def gen(self, name: str | None, params: GenParams) -> tuple[Any, dict[str, Any]] | None:
        del name
        limit = params.max_new_tokens
        if params.n > 1 or limit is None:
            self._surplus = ""
            return self._call(params)
        stops = as_list(params.stop)
        meta: dict[str, Any] = {}
        if not self._surplus:
            asked = max(limit, self._num_tokens)
            text, meta = self._call(params.with_values(max_new_tokens=asked, stop=()))
            self._surplus = text
            self._ended = meta.get("finish_reason") == "stop" or asked == limit
        position = find_stop(self._surplus, stops)
        if position < 0 and self._ended and len(self._surplus) <= max(limit, 1):
            position = len(self._surplus)
        if position < 0:
            self._surplus = ""
            return self._call(params)
        text, self._surplus = self._surplus[:position], self._surplus[position:]
        return text, meta

    def end_message(self) -> Results:
        return []


@dataclass(frozen=True, slots=True)
class _Term:
    text: str | None  # None for a gen
    name: str | None = None
    stops: tuple[str, ...] = ()


class ChatSpeculation:
    """For chat services: requests a message of several gens and texts in one call."""

    def __init__(self, num_tokens: int, call: Call) -> None:
        self._num_tokens = num_tokens
        self._call = call
        self._terms: list[_Term] = []
        self._params: GenParams | None = None

    def fill(self, text: str, *, of_message: bool) -> bool:
        if of_message and text:
            self._terms.append(_Term(text))
        return of_message

    def gen(self, name: str | None, params: GenParams) -> None:
        """See `StateSpeculation.gen`.

        Raises:
            ValueError: the gens of one message differ in more than name, length and stops.
        """
        shared = params.with_values(max_new_tokens=self._num_tokens, stop=())
        if self._params is not None and shared.values != self._params.values:
            raise ValueError(
                "the gen calls of one message must have the same sampling parameters "
                "(but for max_tokens and stop) with num_api_spec_tokens"
            )
        self._params = shared
        self._terms.append(_Term(None, name, tuple(as_list(params.stop))))

    def end_message(self) -> Results:
        """See `StateSpeculation.end_message`.

        Raises:
            BackendError: the model's answer did not follow the program's texts in any try.
        """
        terms, params = self._terms, self._params
        self._terms, self._params = [], None
        if params is None:
            return [(None, term.text) for term in terms if term.text is not None]
        answer = ""
        for _ in range(MAX_TRIES):
            answer, _meta = self._call(params)
            answer = answer[0] if isinstance(answer, list) else answer
            if (results := _match(terms, answer)) is not None:
                return results
        raise BackendError(
            f"the model's answer does not follow the program's message, in {MAX_TRIES} tries; "
            f"the last was {answer!r}"
        )


def _match(terms: list[_Term], answer: str) -> Results | None:
    results: Results = []
    for i, term in enumerate(terms):
        if term.text is not None:
            if not answer.startswith(term.text):
                return None
            results.append((None, term.text))
            answer = answer[len(term.text) :]
            continue
        end = find_stop(answer, list(term.stops))
        if end < 0 and i < len(terms) - 1:
            return None
        end = len(answer) if end < 0 else end
        results.append((term.name, answer[:end]))
        answer = answer[end:]
    return results
