"""Workloads with the lengths and shared prefixes of load test data sets, without a tokenizer.

Lengths are drawn from the same distributions as in `sylvan.bench.datasets`, whose prompts are
texts; these are token IDs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated

import msgspec

from sylvan.config.bench import DataConfig
from sylvan.config.simulate import ArrivalConfig
from sylvan.protocol.errors import ConfigError
from sylvan.sim.workload import Part, PromptBlock, SimulatedConversation, SimulatedTurn, Workload

OUTPUT_TOKENS = {"random": 1024, "shared-prefix": 256}
TRACE_BLOCK = 512  # tokens per hash ID of a trace
WARMUP_TOKENS = 32
MAX_REQUESTS = 10_000_000
MAX_TRACE_BYTES = 4 << 30
_OWN, _GROUP, _TRACE, _REST = range(4)  # kinds of blocks, in their seeds

Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Draft = Sequence[tuple[Sequence[SimulatedTurn], float | None]]
"""Turns of each conversation, and its start time in a trace."""


class Line(msgspec.Struct, frozen=True):
    """A line of a trace in Mooncake's format."""

    input_length: Length
    output_length: Length
    timestamp: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # ms
    hash_ids: tuple[int, ...] = ()


def drawn(config: DataConfig) -> Draft:
    """Draw the conversations of a data set, reproducibly by seed.

    Raises:
        ConfigError: The file is invalid or empty, or the data set needs texts.
    """
    if config.dataset not in _DATA_SETS:
        raise ConfigError(
            f"data.dataset {config.dataset} needs sim.tokenizer: its prompts are texts"
        )
    if (config.dataset == "trace") is (config.path is None):
        needs = "needs" if config.path is None else "takes no"
        raise ConfigError(f"data.dataset {config.dataset} {needs} data.path")
    for setting, asked in (
        ("data.requests", config.requests),
        ("data.groups x data.prompts_per_group", config.groups * config.prompts_per_group),
    ):
        if asked > MAX_REQUESTS:
            raise ConfigError(f"{setting}: {asked} requests; the limit is {MAX_REQUESTS}")
    if config.suffix:
        raise ConfigError("data.suffix needs sim.tokenizer: it is a text")
    found = _DATA_SETS[config.dataset](config)
    if not found:
        raise ConfigError(f"{config.path}: no entry fits (data.offset, data.context_tokens)")
    return found


def arranged(turns: Draft, load: ArrivalConfig, seed: int) -> Workload:
    """Return conversations with start times, the same as a load test with the same seed.

    Raises:
        ConfigError: Start times are needed, but the data has none.
    """
    rng, due_s = random.Random(seed), 0.0
    made: list[SimulatedConversation] = []
    for number, (each, at_s) in enumerate(turns):
        if load.timestamps:
            if at_s is None:
                raise ConfigError("load.timestamps: only data.dataset trace has times")
            due_s = at_s * load.slowdown
        elif load.rate is not None and number:
            shape = load.burstiness
            due_s += rng.gammavariate(shape, 1 / (load.rate * shape))
        made.append(SimulatedConversation(each, due_s))
    first = made[0].turns[0]
    short = SimulatedTurn(first.parts, min(first.output_tokens, WARMUP_TOKENS))
    return Workload(made, load.concurrency, [short] * load.warmup)


def _random(config: DataConfig) -> Draft:
    lengths, numbers = _Lengths(config), count()
    left, made = config.requests, list[tuple[Sequence[SimulatedTurn], float | None]]()
    while left > 0:
        turns = [
            _turn(config, lengths, [], config.input_tokens, next(numbers))
            for _ in range(min(config.turns, left))
        ]
        made.append((turns, None))
        left -= len(turns)
    return made


def _shared_prefix(config: DataConfig) -> Draft:
    lengths, numbers = _Lengths(config), count()
    made: list[tuple[Sequence[SimulatedTurn], float | None]] = []
    for group in range(config.groups):
        length = lengths.draw(config.system_tokens)
        before = [PromptBlock((config.seed, _GROUP, group), length, shared=True)]
        for _ in range(config.prompts_per_group):
            parts = [before, *([[]] * (config.turns - 1))]
            turns = [
                _turn(config, lengths, part, config.question_tokens, next(numbers))
                for part in parts
            ]
            made.append((turns, None))
    if not config.ordered:
        lengths.rng.shuffle(made)
    return made


def _turn(
    config: DataConfig, lengths: _Lengths, before: Sequence[Part], most: int, number: int
) -> SimulatedTurn:
    own = PromptBlock((config.seed, _OWN, number), lengths.draw(most))
    default = OUTPUT_TOKENS[config.dataset]
    return SimulatedTurn([*before, own], lengths.draw(config.output_tokens or default))


def _trace(config: DataConfig) -> Draft:
    made: list[tuple[Sequence[SimulatedTurn], float | None]] = []
    began_ms: float | None = None
    for number, line in enumerate(lines(config.path or "")):
        if len(made) == config.requests:
            break
        output = config.output_tokens or line.output_length
        whole = line.input_length + output
        if number < config.offset or whole > (config.context_tokens or whole):
            continue
        began_ms = line.timestamp if began_ms is None else began_ms
        at_s = max(0.0, (line.timestamp - began_ms) / 1000)
        made.append(([SimulatedTurn(_blocks(config, line), output)], at_s))
    return made


def _blocks(config: DataConfig, line: Line) -> Sequence[Part]:
    numbers = line.hash_ids[: line.input_length // TRACE_BLOCK]
    found = [PromptBlock((config.seed, _TRACE, each), TRACE_BLOCK, shared=True) for each in numbers]
    rest = line.input_length - len(found) * TRACE_BLOCK
    if rest:
        found.append(PromptBlock((config.seed, _REST, rest, *line.hash_ids), rest))
    return found


def lines(name: str) -> Iterator[Line]:
    """Read the lines of a trace.

    Raises:
        ConfigError: It is unreadable, or a line is invalid; names line, field and limit.
    """
    path = Path(name).expanduser()
    decoder = msgspec.json.Decoder(Line)
    try:
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise ConfigError(f"data.path: {name} is larger than {MAX_TRACE_BYTES >> 30} GiB")
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield _line(decoder, text, f"{name}, line {number}")
    except OSError as error:
        raise ConfigError(f"data.path: cannot read {name}: {error.strerror}") from error


def _line(decoder: msgspec.json.Decoder[Line], text: bytes, where: str) -> Line:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from error


class _Lengths:
    """Draws lengths as `bench.datasets.prompts` does."""

    def __init__(self, config: DataConfig) -> None:
        self.rng = random.Random(config.seed)
        self._ratio = config.range_ratio

    def draw(self, most: int) -> int:
        """Draw a length between `range_ratio * most` (at least 1) and `most`."""
        return self.rng.randint(max(1, int(self._ratio * most)), most)


_DATA_SETS: Mapping[str, Callable[[DataConfig], Draft]] = {
    "random": _random,
    "shared-prefix": _shared_prefix,
    "trace": _trace,
}
