"""Architectures that are known but not served, with the reason.

The fallback finds reasons for causal models of transformers itself; these are other models that
users ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "BailingMoeV2_5ForCausalLM": (
            "it mixes latent attention with lightning attention, whose output is gated and normed "
            "by groups, in one model"
        ),
        "GigaChat35ForCausalLM": (
            "it mixes latent attention with gated delta nets, and norms after each of them"
        ),
        "Grok1ForCausalLM": (
            "the checkpoint of Grok 2 is sharded for 8 GPUs: 8 files have tensors of the same names"
        ),
        "IQuestLoopCoderForCausalLM": (
            "in its second pass over the layers, heads mix two attentions, one to the keys of the "
            "first pass"
        ),
        "IQuestQ1ForCausalLM": (
            "the sink of a head is a key, so its score depends on the query, which no attention "
            "kernel takes"
        ),
        "JetNemotronForCausalLM": "the taps of its convolutions are computed from the rows",
        "KimiK3LinearForCausalLM": (
            "layers attend to the outputs of earlier layers, and experts compute in a latent space"
        ),
        "MiniCPMSALAForCausalLM": (
            "some layers select blocks of tokens by scores of means of keys (InfLLM v2)"
        ),
        "MindSporeForCausalLM": "it is a placeholder for any model of the framework MindSpore",
        "MuseGlimmerForCausalLM": "transformers has it only together with its image encoder",
        "NemotronHPuzzleForCausalLM": (
            "layers have different numbers and widths of experts, which transformers lacks, too"
        ),
    }
)
