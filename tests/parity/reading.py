"""Models whose encoder reads the prompt: tiny configs, and both sides of the comparison.

The text of a decoder's prompt follows from its second token, so that transformers and Sylvan get
the same pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from torch import nn

from sylvan.config.media import MediaConfig
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.features.multimodal.build import media_control, media_worker
from sylvan.runtime.models.registry import load_config
from sylvan.runtime.tokenizer.checks import CheckedPrompt
from sylvan.runtime.tokenizer.encoder_prompts import encoded_prompt
from sylvan.runtime.tokenizer.types import ServedModelInfo
from tests.parity.checkpoints import VOCAB, write
from tests.parity.rare import BOTH_HALVES
from tests.parity.serving import Serving

START = 1
WHOLE = BOTH_HALVES | {"is_decoder": False, "is_encoder_decoder": True, "encoder_layers": 2}
RELATIVE = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 24,
    "d_ff": 112,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 40,
    "decoder_start_token_id": START,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_factor": 3.0,
}

STD = {"relative_attention_bias": 1.5, "q": 0.03}  # scores are not scaled


def _whole(name: str, **changes: object) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**WHOLE | changes)


def _relative(name: str, **changes: object) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**RELATIVE | changes)


READING: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "bart-pair": _whole("BartConfig"),
        "blenderbot-pair": _whole("BlenderbotConfig"),
        "blenderbot-small-pair": _whole("BlenderbotSmallConfig"),
        "marian-pair": _whole("MarianConfig"),
        "mbart-pair": _whole("MBartConfig"),
        "mt5": _relative("MT5Config"),
        "mvp-pair": _whole("MvpConfig"),
        "nllb": _whole("M2M100Config", scale_embedding=True),
        "pegasus-pair": _whole("PegasusConfig"),
        "plbart-pair": _whole("PLBartConfig"),
        "t5": _relative("T5Config"),
        "t5-gated": _relative("T5Config", feed_forward_proj="gated-gelu"),
        "umt5": _relative("UMT5Config"),
    }
)


def text_of(ids: Sequence[int]) -> list[int]:
    """The encoder's input for a decoder's prompt."""
    rng = np.random.default_rng(int(ids[1]))
    return rng.integers(4, VOCAB, int(rng.integers(3, 40))).tolist()


class Pair(nn.Module):
    """A model of transformers as a function of the decoder's ids."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def set_experts_implementation(self, name: str) -> None:
        """No experts."""

    def forward(self, ids: torch.Tensor, *, use_cache: bool = False) -> Any:
        text = torch.tensor([text_of(ids[0].tolist())])
        return self.inner(input_ids=text, decoder_input_ids=ids, use_cache=use_cache)


class ReadingServing(Serving):
    """Gives each prompt its text."""

    def __init__(self, model_dir: Path, **options: Any) -> None:
        [control] = media_control(MediaConfig(vector_bytes=1 << 20), load_config(model_dir))
        self.control = control
        options = {"workers": (media_worker,)} | options
        super().__init__(model_dir, capabilities=(control,), **options)
        send = self.scheduler.add
        self.scheduler.add = lambda request: send(_with_text(request))  # type: ignore[method-assign]


def _with_text(request: Any) -> GenerateRequest:
    start, *begins = request.input_ids.tolist()
    facts = ServedModelInfo(
        model_path="",
        served_name="",
        context_len=256,
        vocab_size=VOCAB,
        decoder_prompt=(start,),
        encoder_len=256,
    )
    text = CheckedPrompt(text_of(request.input_ids), "text")
    prompt, item = encoded_prompt(text, begins, facts)
    assert prompt.ids.tolist() == request.input_ids.tolist()
    return msgspec.structs.replace(request, media=(item,))


def pair(name: str, folder: Path) -> Pair:
    """Write the checkpoint of a family; return transformers' model of it."""
    auto = SimpleNamespace(from_config=partial(_built, name))
    return Pair(write(READING[name](), len(name), folder, auto=auto))


def _built(name: str, config: Any, **options: Any) -> Any:
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, **options)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if name.startswith(("t5", "mt5", "umt5")) and parameter.dim() == 2:
                parameter.normal_(0, STD.get(key.split(".")[-2], 0.15))
        if "final_logits_bias" in dict(model.named_buffers()) and name.startswith("marian"):
            model.final_logits_bias.normal_(0, 0.5)
    return model
