"""Requests of a production trace, in Mooncake's published format.

Each line has `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`: one number
for each 512 tokens of the prompt, the same number for the same tokens, so that prefixes are shared
as in production.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from sylvan.bench.datasets.files import json_lines, positive
from sylvan.bench.datasets.prompts import RandomPrompts
from sylvan.bench.workload import BenchConversation, BenchTurn
from sylvan.config.bench import DataConfig
from sylvan.protocol.errors import ConfigError

BLOCK_TOKENS = 512


def load(config: DataConfig, prompts: RandomPrompts) -> Sequence[BenchConversation]:
    """See `sylvan.bench.datasets.load`.

    Raises:
        ConfigError: A line has another format.
    """
    assert config.path is not None, "checked when the data set is chosen"
    blocks = _Blocks(prompts, config.seed)
    made: list[BenchConversation] = []
    began_ms: float | None = None
    for number, (where, entry) in enumerate(json_lines(config.path)):
        if len(made) == config.requests:
            break
        if number < config.offset:
            continue
        at_ms = entry.get("timestamp", 0)
        if isinstance(at_ms, bool) or not isinstance(at_ms, (int, float)) or at_ms < 0:
            raise ConfigError(f"{where}: timestamp must be a number of milliseconds")
        length = positive(entry.get("input_length"), where, "input_length")
        output = config.output_tokens or positive(
            entry.get("output_length"), where, "output_length"
        )
        if config.context_tokens is not None and length + output > config.context_tokens:
            continue
        text, ids = prompts.with_suffix(*blocks.prompt(_hashes(where, entry), length))
        began_ms = at_ms if began_ms is None else began_ms
        turn = BenchTurn(text, len(ids), output, ids)
        made.append(BenchConversation([turn], at_s=max(0.0, (at_ms - began_ms) / 1000)))
    return made


class _Blocks:
    """The tokens for the hash IDs of a trace."""

    def __init__(self, prompts: RandomPrompts, seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._known: dict[int, tuple[str, list[int]]] = {}

    def prompt(self, hashes: Sequence[int], length: int) -> tuple[str, list[int]]:
        """Return a prompt of `length` tokens that starts with the given blocks."""
        ids: list[int] = []
        texts: list[str] = []
        for number in hashes[: length // BLOCK_TOKENS]:
            if number not in self._known:
                self._prompts.rng.seed(f"{self._seed}/{number}")
                self._known[number] = self._prompts.draw(BLOCK_TOKENS)
            texts.append(self._known[number][0])
            ids += self._known[number][1]
        self._prompts.rng.seed(f"{self._seed}/{len(ids)}/{length}/{list(hashes)}")
        text, rest = self._prompts.draw(length - len(ids)) if length > len(ids) else ("", [])
        return "".join([*texts, text]), [*ids, *rest]


def _hashes(where: str, entry: dict[str, object]) -> list[int]:
    found = entry.get("hash_ids", [])
    if not isinstance(found, list) or not all(
        isinstance(item, int) for item in cast("list[object]", found)
    ):
        raise ConfigError(f"{where}: hash_ids must be a list of numbers")
    return cast("list[int]", found)
