"""Fill-in-the-middle (FIM) prompts: the model writes the text between two others.

FIM models mark the two texts with control tokens; the forms come from their model cards. In the
table, BEFORE is the text before the gap, AFTER the text after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.text.tokenizer import Tokenizer

BEFORE, AFTER = "<", ">"
_FORMS = (
    ("<|fim_prefix|>", BEFORE, "<|fim_suffix|>", AFTER, "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", BEFORE, "<fim_suffix>", AFTER, "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", BEFORE, "<fim-suffix>", AFTER, "<fim-middle>"),  # SantaCoder
    (
        "<\uff5cfim\u2581begin\uff5c>",
        BEFORE,
        "<\uff5cfim\u2581hole\uff5c>",
        AFTER,
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek
    ("<|code_prefix|>", BEFORE, "<|code_suffix|>", AFTER, "<|code_middle|>"),  # GLM
    ("[SUFFIX]", AFTER, "[PREFIX]", BEFORE),  # Codestral
)


FIM_UNSUPPORTED = "suffix is not supported: this model does not support fill-in-the-middle."


class Infill:
    """Builds FIM prompts for one tokenizer; false if its model does not support FIM."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        known = tokenizer.protected
        forms = (f for f in _FORMS if all(p in (BEFORE, AFTER) or p in known for p in f))
        self._form: tuple[str, ...] = next(forms, ())

    def __bool__(self) -> bool:
        return bool(self._form)

    def encode(self, before: str | Sequence[int], after: str) -> list[int]:
        """Token ids of the prompt; the two texts cannot forge control tokens."""
        if not isinstance(before, str):
            return self._around(list(before), after)
        texts = {BEFORE: (before, False), AFTER: (after, False)}
        segments = [texts.get(part, (part, True)) for part in self._form]
        return self._tokenizer.encode_segments(
            [segment for segment in segments if segment[0]], add_special_tokens=True
        )

    def _around(self, before: list[int], after: str) -> list[int]:
        ids: list[int] = []
        for part in self._form:
            if part == BEFORE:
                ids += before
            elif part == AFTER:
                ids += self._tokenizer.encode_user(after, add_special_tokens=False)
            else:
                ids.append(self._tokenizer.protected[part])
        return ids
