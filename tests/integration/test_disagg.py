"""A prefill and a decode server: answers are those of one server, whatever layers keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.roles import KINDS, Pair, Server, prompt, write_kind


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_kind(folder / kind.replace(" ", "-"), kind) for kind in KINDS}


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    found: list[Any] = []
    yield found
    for server in found:
        server.close()


LENGTHS = (1, 2, 15, 16, 17, 33, 48, 63, 64, 65, 100, 129, 200, 301)


def answers(ask: Any, tokens: Any, run: Any) -> dict[str, list[int]]:
    """Prompts of many lengths, some of which share a start; then all of them again."""
    names: list[str] = []
    for turn in range(2):
        for length in LENGTHS:
            names.append(f"{turn}-{length}")
            ask(names[-1], prompt(length, length))
            names.append(f"{turn}-{length}-shared")
            ask(names[-1], [*prompt(301, 301)[: length // 2], *prompt(length, 99 + turn)])
        run()
    return {name: tokens(name) for name in names}


@pytest.mark.parametrize("transfer", ["tcp", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_one_server(opened, models, kind, transfer):
    alone = Server(models[kind])
    pair = Pair(models[kind], disagg__transfer=transfer)
    opened += [alone, pair]

    def run_alone() -> None:
        while not alone.scheduler.idle:
            alone.step()

    expected = answers(alone.add, alone.tokens, run_alone)
    found = answers(pair.ask, pair.decode.tokens, pair.run)

    assert found == expected
    state = pair.decode.state()
    assert state["failed"] == state["refused"] == 0
    assert state["done"] == 2 * 2 * len(LENGTHS)
    assert state["num_bytes"] > 0
    assert pair.prefill.is_clean()
    assert pair.decode.is_clean()
