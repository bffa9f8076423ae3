"""Causal models of transformers that are not served, and why: the rest of the table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OWN_ATTENTION = "computes attention by itself, without transformers' interface"
INDEXED = "chooses tokens by an index of its own (sparse attention)"
OWN_STATE = "keeps recurrent states in a way of its own"
IMAGES = "needs images or sounds"
SERVED = "served, with images or sounds: [multimodal](../howto/multimodal.md)"
MASKS = "masks or biases attention in a way of its own"

LEFT: Mapping[str, str] = MappingProxyType(
    {
        "AXK2ForCausalLM": INDEXED,
        "BigBirdForCausalLM": OWN_ATTENTION,
        "BigBirdPegasusForCausalLM": OWN_ATTENTION,
        "BltForCausalLM": "cuts bytes into patches by a model of its own",
        "CohereCompassForCausalLM": "its layers have types that its masks do not know",
        "CpmAntForCausalLM": OWN_ATTENTION,
        "DogeForCausalLM": MASKS,
        "Dots3NoteForCausalLM": INDEXED,
        "Emu3ForCausalLM": IMAGES,
        "FuyuForCausalLM": IMAGES,
        "Gemma3nForConditionalGeneration": SERVED,
        "Gemma4AssistantForCausalLM": "drafts for another model",
        "Gemma4ForConditionalGeneration": SERVED,
        "Gemma4UnifiedAssistantForCausalLM": "drafts for another model",
        "Gemma4UnifiedForConditionalGeneration": SERVED,
        "GitForCausalLM": IMAGES,
        "GotOcr2ForConditionalGeneration": SERVED,
        "HYV4ForCausalLM": INDEXED,
        "Inkling2ForCausalLM": MASKS,
        "Inkling2LoopForCausalLM": MASKS,
        "InklingForCausalLM": MASKS,
        "MllamaForCausalLM": "half of MllamaForConditionalGeneration, which is served",
        "MossTranscribeDiarizeForConditionalGeneration": IMAGES,
        "MoshiForCausalLM": "speaks: its tokens come with those of an audio model",
        "MusicgenForCausalLM": "its tokens are sounds",
        "MusicgenMelodyForCausalLM": "its tokens are sounds",
        "Phi4MultimodalForCausalLM": SERVED,
        "ProphetNetForCausalLM": OWN_ATTENTION,
        "Qwen4ExpForCausalLM": OWN_STATE,
        "ReformerModelWithLMHead": OWN_ATTENTION,
        "WhisperForCausalLM": "its tokens follow sounds",
        "XLMWithLMHeadModel": OWN_ATTENTION,
        "XLNetLMHeadModel": OWN_ATTENTION,
        "XmodForCausalLM": "needs to be told its language",
    }
)
"""Architecture -> reason. A test holds that every other one is in the table."""
