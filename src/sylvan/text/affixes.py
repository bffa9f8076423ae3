"""Special tokens that a tokenizer adds before and after a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from sylvan.text.encoding import token_ids


@dataclass(frozen=True, slots=True)
class Affixes:
    """Special tokens added to every text.

    Attributes:
        around: Ids before and after a text; None if they depend on the text.
        bos_id: Start-of-text token, or None.
        bos_text: Its spelling.
    """

    around: tuple[Sequence[int], Sequence[int]] | None
    bos_id: int | None
    bos_text: str

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, bos_id: int | None) -> Affixes:
        """Determine the affixes by encoding the letter `a`."""
        ids = token_ids(backend, "a", add_special_tokens=False)
        whole = token_ids(backend, "a", add_special_tokens=True)
        places = range(len(whole) - len(ids) + 1) if ids else ()
        at = next((at for at in places if whole[at : at + len(ids)] == ids), None)
        around = None if at is None else (tuple(whole[:at]), tuple(whole[at + len(ids) :]))
        text = "" if bos_id is None else backend.id_to_token(bos_id)
        return cls(around, bos_id, text or "")

    def added(self, ids: Sequence[int], text: str) -> list[int]:
        """Add special tokens to the ids of a text."""
        head, tail = self.around or ((), ())
        return self.without_second_bos([*head, *ids, *tail], text)

    def without_second_bos(self, ids: list[int], text: str) -> list[int]:
        """Drop the added start token if the text itself spells one."""
        if len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            name = self.bos_text
            if name and text.startswith(name) and not text.startswith(name * 2):
                return ids[1:]
        return ids
