"""All errors that this package raises on purpose.

* SylvanError
  - ConfigError        the operator's fault; refuse to start (exit code 2)
  - RequestError       the client's fault; fails one request (HTTP 4xx)
    - ContextLengthError the model cannot take as many tokens
  - CapacityError      a full resource; retry later (HTTP 429 or 503)
  - ExecutorError      a device or rank failed; its requests are retried or aborted
    - DeviceMemoryError  a step ran out of memory; smaller ones follow
  - RankLostError      a rank is gone; its group restarts and requests are replayed
"""

from __future__ import annotations

from copy import copy
from typing import Self


class SylvanError(Exception):
    """Base of all errors of this package."""


class ConfigError(SylvanError):
    """The configuration, or the model it names, cannot be served."""


class RequestError(SylvanError):
    """The request cannot be served, whatever the load.

    Args:
        message: One sentence that names the field and the limit.
        param: Path of the offending field as the client spelt it, if one is to blame.
        status: HTTP status.
        code: Machine-readable error code.
        setting: The setting whose limit the request exceeds, if any.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        setting: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.setting = setting

    def renamed(self, message: str, param: str) -> Self:
        """The same error with the client's name of the field."""
        error = copy(self)
        error.args, error.param = (message,), param
        return error


class ContextLengthError(RequestError):
    """The prompt, or prompt plus output, exceeds the model's context.

    Clients that recognise the code or message shorten the prompt or switch models.

    Attributes:
        limit: Maximum of prompt plus output tokens.
        prompt_tokens: Tokens of the prompt; None if it was not tokenised.
        max_new_tokens: Requested output tokens; None if the prompt alone is too long.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        limit: int = 0,
        prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.limit = limit
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens

    @classmethod
    def of_text(cls, num_chars: int, limit: int, param: str) -> Self:
        """The error for a text that is too long in any tokenisation."""
        message = (
            f"This model's maximum context length is {limit} tokens. However, {param} has "
            f"{num_chars} characters, far more than as many tokens hold."
        )
        return cls(message, param=param, limit=limit)

    @classmethod
    def of_prompt(cls, prompt_tokens: int, limit: int, param: str) -> Self:
        """The error for a prompt that leaves no room for an output."""
        message = (
            f"This model's maximum context length is {limit} tokens. However, {param} has "
            f"{prompt_tokens} tokens: the input is longer than the model's context length."
        )
        return cls(message, param=param, limit=limit, prompt_tokens=prompt_tokens)

    @classmethod
    def of_output(cls, prompt_tokens: int, max_new_tokens: int, limit: int) -> Self:
        """The error for a prompt that fits, but not with the requested output."""
        message = (
            f"max_new_tokens: this model's maximum context length is {limit} tokens. However, you "
            f"requested {prompt_tokens + max_new_tokens} tokens: {prompt_tokens} of the prompt and "
            f"{max_new_tokens} of the output. There is room for {limit - prompt_tokens}."
        )
        return cls(
            message,
            param="max_new_tokens",
            limit=limit,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
        )


class CapacityError(SylvanError):
    """The request could be served at another time.

    Args:
        message: The full resource and its size.
        status: 503 or 429.
        retry_after_s: Seconds after which to retry.
        setting: The setting whose limit was reached, if any.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 503,
        retry_after_s: float = 1.0,
        setting: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.setting = setting


class ExecutorError(SylvanError):
    """A step failed on a device or rank."""


class DeviceMemoryError(ExecutorError):
    """The device ran out of memory in a step; a smaller one may fit."""


class RankLostError(SylvanError):
    """Another rank of this model has ended or does not answer; all ranks stop."""
