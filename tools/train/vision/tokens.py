"""Sapling's tokens, and one more for pictures."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer

from tools.train.evaluate import ASSETS
from tools.train.vision import questions
from tools.train.vision.model import IMAGE_TOKEN


def load_tokenizer() -> Tokenizer:
    """Sapling's tokenizer, and a token that stands for a patch of a picture."""
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(questions.IMAGE, special=True)])
    if tokenizer.token_to_id(questions.IMAGE) != IMAGE_TOKEN:
        raise ValueError("sapling's vocabulary has changed")
    return tokenizer
