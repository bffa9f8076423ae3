"""How `select` chooses, from the log probabilities of the choices' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

TokenLogprob = Sequence[Any]  # (log probability or None, token id, text or None)


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """The selected choice, and the scores of all."""

    decision: str
    meta_info: dict[str, Any] | None = None


class ChoicesMethod(Protocol):
    """Picks a choice. Called with keyword arguments only.

    `input_token_logprobs[i]` are the tokens of choice `i` after the prompt;
    `normalized_prompt_logprobs[i]` is their mean. The unconditional ones, of the same tokens
    without the prompt, are given if `requires_unconditional_logprobs`.
    """

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether the backend must also score the choices without the prompt."""
        ...

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[Sequence[TokenLogprob]],
        output_token_logprobs: Sequence[Sequence[TokenLogprob]],
        unconditional_token_logprobs: Sequence[Sequence[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        """Pick one of `choices`; ties go to the first."""
        ...


def mean_logprob(tokens: Sequence[TokenLogprob]) -> float:
    """Mean over the tokens that have a log probability; 0 if none has."""
    values = [token[0] for token in tokens if token[0] is not None]
    return sum(values) / len(values) if values else 0.0


def _argmax(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


class TokenLengthNormalized:
    """The choice whose tokens are most likely on average."""

    requires_unconditional_logprobs = False

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[Sequence[TokenLogprob]],
        output_token_logprobs: Sequence[Sequence[TokenLogprob]],
        unconditional_token_logprobs: Sequence[Sequence[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        meta = {
            "normalized_prompt_logprobs": normalized_prompt_logprobs,
            "input_token_logprobs": input_token_logprobs,
            "output_token_logprobs": output_token_logprobs,
        }
        return ChoicesDecision(choices[_argmax(normalized_prompt_logprobs)], meta)


class GreedyTokenSelection:
    """Position by position, keep the choices whose token is most likely.

    A choice that is shorter than another is continued with its own mean.
    """

    requires_unconditional_logprobs = False

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[Sequence[TokenLogprob]],
        output_token_logprobs: Sequence[Sequence[TokenLogprob]],
        unconditional_token_logprobs: Sequence[Sequence[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        matrix = _padded(input_token_logprobs)
        left = list(range(len(choices)))
        for column in range(len(matrix[0])):
            best = max(matrix[row][column] for row in left)
            left = [row for row in left if matrix[row][column] == best]
            if len(left) == 1:
                break
        meta = {
            "normalized_prompt_logprobs": normalized_prompt_logprobs,
            "input_token_logprobs": input_token_logprobs,
            "output_token_logprobs": output_token_logprobs,
            "greedy_logprob_matrix": matrix,
        }
        return ChoicesDecision(choices[left[0]], meta)


def _padded(rows: Sequence[Sequence[TokenLogprob]]) -> list[list[float]]:
    width = max(len(row) for row in rows)
    return [
        [token[0] or 0.0 for token in row] + [mean_logprob(row)] * (width - len(row))
        for row in rows
    ]


class UnconditionalLikelihoodNormalized:
    """The choice whose likelihood the prompt increases most, on average over its tokens."""

    requires_unconditional_logprobs = True

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[Sequence[TokenLogprob]],
        output_token_logprobs: Sequence[Sequence[TokenLogprob]],
        unconditional_token_logprobs: Sequence[Sequence[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        """See `ChoicesMethod`.

        Raises:
            ValueError: the unconditional log probabilities are missing.
        """
        if unconditional_token_logprobs is None:
            raise ValueError("unconditional token log probabilities are required")
        scores = [
            _mean_gain(inputs, alone)
            for inputs, alone in zip(
                input_token_logprobs, unconditional_token_logprobs, strict=True
            )
        ]
        meta = {
            "normalized_prompt_logprobs": normalized_prompt_logprobs,
            "input_token_logprobs": input_token_logprobs,
            "output_token_logprobs": output_token_logprobs,
            "unconditional_token_logprobs": unconditional_token_logprobs,
            "normalized_unconditional_prompt_logprobs": scores,
        }
        return ChoicesDecision(choices[_argmax(scores)], meta)


def _mean_gain(inputs: Sequence[TokenLogprob], alone: Sequence[TokenLogprob]) -> float:
    # Nothing precedes the first token of `alone`, so it has no log probability: 0 instead.
    gains = [(a[0] or 0.0) - (b[0] or 0.0) for a, b in zip(inputs, alone, strict=True)]
    return sum(gains) / len(gains)


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()
