"""`select` for services with a logit bias but without scoring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

FORCE = 100  # a bias that excludes all other tokens
MAX_BIASED = 300  # limit of the OpenAI API


class TokenEncoding(Protocol):
    """A tokenizer with `tiktoken`'s interface."""

    n_vocab: int

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens."""
        ...


def integer_bias(encoding: TokenEncoding) -> dict[int, int]:
    """A bias that allows only digits and a space."""
    texts = [str(n) for n in range(1000)] + [f"0{n}" for n in range(10)] + [" "]
    found: dict[int, int] = {}
    for text in texts:
        tokens = encoding.encode(text)
        if len(tokens) == 1 and len(found) < MAX_BIASED:
            found[tokens[0]] = FORCE
    found[encoding.encode(" ")[0]] = FORCE
    return found


def search_choice(
    encoding: TokenEncoding,
    prompt: str,
    choices: Sequence[str],
    next_token: Callable[[list[int], dict[int, int]], str],
) -> list[int]:
    """Let the service descend the tree of the choices' tokens.

    Args:
        encoding: The model's tokenizer.
        prompt: Text before the choice.
        choices: The choices.
        next_token: Requests one token after a prompt of tokens, with a bias.

    Returns:
        Number of tokens of each choice that the service generated.
    """
    tokens = [encoding.encode(choice) for choice in choices]
    scores = [0] * len(choices)
    alive = [i for i, row in enumerate(tokens) if row]
    prefix = encoding.encode(prompt)
    step = 0
    while alive:
        bias = {tokens[i][step]: FORCE for i in alive}
        taken = encoding.encode(next_token(prefix, bias))[0]
        hits = [i for i in alive if tokens[i][step] == taken]
        for i in hits:
            scores[i] += 1
        step += 1
        if len(hits) <= 1:
            break
        prefix = [*prefix, taken]
        alive = [i for i in hits if step < len(tokens[i])]
    return scores
