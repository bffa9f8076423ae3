"""The generation service: the parts that generate answers, bound to a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sylvan.api.native import RequestBodyLimits
from sylvan.api.sampling import SamplingDefaults, model_defaults, read_sampling
from sylvan.config.tree import TextConfig
from sylvan.protocol.errors import ConfigError, RequestError
from sylvan.runtime.serving.journal import CallJournal, Journal, NoJournal
from sylvan.runtime.serving.pairing import Pairing
from sylvan.runtime.serving.sessions import SessionLimits, SessionStore
from sylvan.runtime.tokenizer.manager import NO_ORIGIN, TokenizerManager
from sylvan.runtime.tokenizer.types import GenerateInput, Origin
from sylvan.text.chat_template import ChatTemplate
from sylvan.text.parsers import Parsers, make_parsers
from sylvan.utils.clock import Clock, monotonic
from sylvan.utils.json_files import read_json
from sylvan.utils.names import random_hex
from sylvan.utils.variants import variant


def wall_clock() -> float:
    """Return the seconds since the Unix epoch, for time stamps."""
    return datetime.now(tz=UTC).timestamp()


@dataclass(frozen=True, kw_only=True)
class GenerationService:
    """Generates answers: to conversations (`answers`), to `/generate` (`native`), or raw.

    Attributes:
        manager: The TokenizerManager.
        template: Renders conversations as prompts.
        parsers: Parse output into reasoning, answer and tool calls.
        sessions: Sessions of `/generate`.
        text: Configuration of prompts and answers.
        defaults: Default sampling parameters.
        bounds: Returns the current limits of a body.
        clock: Monotonic clock, for durations.
        wall: Wall clock, for time stamps.
        ids: Returns an unguessable ID of that many bytes, in hex.
        journal: Journal of the call.
        pairing: Pairing of the call.
        origin: Origin of the call, for metrics, logs and traces.
    """

    manager: TokenizerManager
    template: ChatTemplate
    parsers: Parsers
    sessions: SessionStore
    text: TextConfig
    defaults: SamplingDefaults
    bounds: Callable[[], RequestBodyLimits]
    clock: Clock = monotonic
    wall: Callable[[], float] = wall_clock
    ids: Callable[[int], str] = random_hex
    journal: CallJournal = field(default_factory=NoJournal)
    pairing: Pairing = field(default_factory=Pairing)
    origin: Origin = NO_ORIGIN

    @property
    def limits(self) -> RequestBodyLimits:
        """Limits of one body."""
        return self.bounds()

    def of_call(self, journal: Journal | None) -> GenerationService:
        """Bind the service to a call; with a journal, IDs and times are those of its ticket."""
        if journal is None:
            return self
        return variant(self, ids=journal.ids, wall=journal.wall(self.clock), journal=journal)

    def placed(self, inputs: Sequence[GenerateInput]) -> list[GenerateInput]:
        """Return the inputs of the call with their rendezvous."""
        placed = self.pairing.placed(self.journal.pinned(inputs))
        origin = self.origin
        return [inp if inp.origin is origin else replace(inp, origin=origin) for inp in placed]

    def variables(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Merge template variables: the operator's, then the request's."""
        return {**self.text.default_chat_template_kwargs, **asked}


def make_service(
    manager: TokenizerManager,
    text: TextConfig,
    bounds: Callable[[], RequestBodyLimits],
    sessions: SessionLimits | None = None,
    clock: Clock = monotonic,
    wall: Callable[[], float] = wall_clock,
) -> GenerationService:
    """Build the service of a served model.

    Args:
        manager: The TokenizerManager.
        text: Configuration of prompts and answers.
        bounds: Returns the current limits of a body.
        sessions: Limits of sessions; None: the defaults.
        clock: Monotonic clock, for durations.
        wall: Wall clock, for time stamps.

    Raises:
        ConfigError: A setting names something unknown, or is not a sampling parameter.
    """
    tokenizer, facts = manager.tokenizer, manager.facts
    kept = sessions or SessionLimits()
    return GenerationService(
        manager=manager,
        template=ChatTemplate(tokenizer),
        parsers=make_parsers(
            tokenizer,
            reasoning_parser=_parser(text.reasoning_parser),
            tool_parser=_parser(text.tool_parser),
            architecture=facts.architecture,
        ),
        sessions=SessionStore(manager.abort, tokenizer.bos_id, clock, kept),
        text=text,
        defaults=sampling_defaults(text, facts.model_path),
        bounds=bounds,
        clock=clock,
        wall=wall,
    )


def sampling_defaults(text: TextConfig, model_path: str) -> SamplingDefaults:
    """Return the defaults of the operator and of the checkpoint.

    Raises:
        ConfigError: The operator's are not valid sampling parameters.
    """
    preferred = dict(text.preferred_sampling_params)
    try:
        read_sampling(preferred, {}, "text.preferred_sampling_params")
    except RequestError as error:
        raise ConfigError(str(error)) from error
    model: dict[str, Any] = {}
    if text.sampling_defaults == "model":
        model = model_defaults(read_generation_config(model_path))
    return SamplingDefaults(preferred=preferred, model=model)


def read_generation_config(model_path: str) -> Mapping[str, Any]:
    """Read the checkpoint's `generation_config.json`; empty if there is none."""
    try:
        value = read_json(Path(model_path) / "generation_config.json")
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _parser(name: str | None) -> str | None:
    return None if name == "none" else name
