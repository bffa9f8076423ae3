"""Which servers report when each word of a transcription is spoken."""

from sylvan.runtime.server.openai.audio import no_word_times
from sylvan.runtime.tokenizer.types import ServedModelInfo

SIZES = {"model_path": "m", "served_name": "m", "context_len": 64, "vocab_size": 9}


def test_word_times_are_refused_where_they_are_not_computed():
    assert not no_word_times(ServedModelInfo(**SIZES))
    assert not no_word_times(ServedModelInfo(**SIZES, extra={"word_times": True}))
    refused = no_word_times(ServedModelInfo(**SIZES, extra={"word_times": False}))
    assert refused.startswith("timestamp_granularities: ")
    assert "device=cpu" in refused
