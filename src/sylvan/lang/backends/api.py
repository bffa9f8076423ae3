"""The backend interface of the interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sylvan.lang.chat_templates import MessageFormat, get_chat_template
from sylvan.lang.choices import ChoicesDecision, ChoicesMethod, token_length_normalized
from sylvan.lang.context import StateContext
from sylvan.lang.sampling import GenParams

Meta = dict[str, Any]
StreamItem = tuple[str, Meta] | tuple[str, Meta, int]  # (delta, meta so far[, sample])


class ProgramHooks:
    """Hooks on the life of programs. The defaults do nothing; hooks only save work."""

    def cache_prefix(self, prefix_str: str) -> None:
        """Compute and cache a text that many programs start with."""

    def uncache_prefix(self, rid: str) -> None:
        """Release a cached prefix."""

    def commit_lazy_operations(self, s: StateContext) -> None:
        """Compute and cache the text of `s`, which is about to fork."""

    def fork_program(
        self,
        src: StateContext,
        dst: Sequence[StateContext],
        position_ids_offset: Sequence[int] | None = None,
    ) -> None:
        """`src` was copied to `dst`."""

    def fill_image(self, s: StateContext) -> None:
        """Compute and cache the images of `s`."""

    def begin_program(self, s: StateContext) -> None:
        """A program starts."""

    def end_program(self, s: StateContext) -> None:
        """A program or a fork of it ended."""

    def end_request(self, rid: str | Sequence[str]) -> None:
        """A request is no longer needed."""


class BaseBackend(ProgramHooks):
    """A model service. Called from many threads at once; calls block.

    Subclasses override what their service supports, at least `generate`. `s` is read only.
    """

    is_chat_model = False  # messages in, one message out; the text cannot be continued
    support_concate_and_append = False

    def __init__(self) -> None:
        self.chat_template: MessageFormat = get_chat_template("default")

    def get_model_name(self) -> str:
        """Name or path of the model."""
        raise NotImplementedError(f"{type(self).__name__} does not know its model")

    def get_chat_template(self) -> MessageFormat:
        """Format of the program's roles for the model."""
        return self.chat_template

    def generate(self, s: StateContext, sampling_params: GenParams) -> tuple[Any, Any]:
        """Continue `s`: text and meta info, or a list of each if `n` is above 1.

        Raises:
            BackendError: the service rejected the request.
            ProgramCancelledError, ProgramTimeoutError: `s.scope` was cancelled or timed out.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot generate")

    def generate_stream(self, s: StateContext, sampling_params: GenParams) -> Iterator[StreamItem]:
        """Continue `s` piece by piece. See `generate`."""
        raise NotImplementedError(f"{type(self).__name__} cannot stream")

    def select(
        self,
        s: StateContext,
        choices: Sequence[str],
        temperature: float,
        choices_method: ChoicesMethod = token_length_normalized,
    ) -> ChoicesDecision:
        """The best continuation of `s` among `choices`."""
        raise NotImplementedError(f"{type(self).__name__} cannot select among choices")

    def concatenate_and_append(self, src_rids: Sequence[str], dst_rid: str) -> None:
        """Join the caches of forked states; only if `support_concate_and_append`."""
        raise NotImplementedError(f"{type(self).__name__} cannot join caches")

    def flush_cache(self) -> Any:
        """Empty the prefix cache."""

    def get_server_info(self) -> Any:
        """The service's info."""

    def shutdown(self) -> None:
        """Close connections and stop processes."""
