"""Architectures that are known by name and cannot be served, each with the reason.

The registry puts the reason into its error. Other causal models of transformers that cannot be
served are refused by the part of their config that Sylvan lacks, so they need no entry here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

_LAYOUT = "its checkpoint has a layout of its own; converted to transformers' it is served as {}"
_UNKNOWN = "neither Sylvan nor the installed transformers has it"
_RECURRENT = "its images cannot be divided among recurrent layers"


def _all(reason: str, names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(names, reason)


UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "BailingMoeV2_5ForCausalLM": (
            "it mixes latent attention with lightning attention, whose output is gated and normed "
            "by groups, in one model"
        ),
        "DeepseekOCRForCausalLM": "its successor is served: DeepseekOcr2ForConditionalGeneration",
        "DeepseekVL2ForCausalLM": "checkpoints name it DeepseekVLV2ForCausalLM, which is served",
        "Ernie4_5_VLMoeForConditionalGeneration": (
            "its experts are chosen by whether a token belongs to a text or to an image"
        ),
        "GigaChat35ForCausalLM": (
            "it mixes latent attention with gated delta nets, and norms after each of them"
        ),
        "Glm5NextForConditionalGeneration": _RECURRENT,
        "GlmImageForConditionalGeneration": "it draws images: its tokens are parts of them",
        "Grok1ForCausalLM": (
            "the checkpoint of Grok 2 is cut for 8 GPUs: 8 files hold tensors of the same name"
        ),
        "IQuestLoopCoderForCausalLM": (
            "in its second pass over the layers, heads mix two attentions, one to the keys of the "
            "first pass"
        ),
        "IQuestQ1ForCausalLM": (
            "the sink of a head is a key, so its score depends on the query, which no attention "
            "kernel takes"
        ),
        "InklingForConditionalGeneration": "it masks or biases attention in a way of its own",
        "JetNemotronForCausalLM": "the taps of its convolutions are computed from the rows",
        "KimiK25ForConditionalGeneration": _LAYOUT.format("Kimi_K25ForConditionalGeneration"),
        "KimiK3LinearForCausalLM": (
            "layers attend to the outputs of earlier layers, and experts compute in a latent space"
        ),
        "LlavaLlamaForCausalLM": _LAYOUT.format("LlavaForConditionalGeneration"),
        "LlavaMistralForCausalLM": _LAYOUT.format("LlavaNextForConditionalGeneration"),
        "LlavaQwenForCausalLM": _LAYOUT.format("LlavaOnevisionForConditionalGeneration"),
        "LlavaVidForCausalLM": _LAYOUT.format("LlavaNextVideoForConditionalGeneration"),
        "MindSporeForCausalLM": "it stands for any model on another framework, MindSpore",
        "MiniCPMO": "of the family, MiniCPM-V 2.6 and 4.6 are served",
        "MiniCPMSALAForCausalLM": (
            "some layers select blocks of tokens by scores of means of keys (InfLLM v2)"
        ),
        "MiniCPMV4_7ForConditionalGeneration": (
            "the places of its images on a canvas are not computed; 4.6 is served"
        ),
        "MiniMaxM3SparseForConditionalGeneration": (
            "only its text part is served: MiniMaxM3VLForCausalLM"
        ),
        "Molmo2ForConditionalGeneration": (
            "tokens of all images of a prompt see each other, so that no image could be cached"
        ),
        "MolmoForCausalLM": _UNKNOWN,
        "MultiModalityCausalLM": _LAYOUT.format("JanusForConditionalGeneration"),
        "MuseGlimmerForCausalLM": "transformers has it only together with its image encoder",
        "NemotronHPuzzleForCausalLM": (
            "each layer has its own number and width of experts; transformers has them all alike"
        ),
        "NemotronH_Nano_Omni_Reasoning_V3": _RECURRENT,
        "NemotronH_Nano_VL_V2": _RECURRENT,
        "NemotronH_Omni_Reasoning_V3": _RECURRENT,
        "Phi4MMForCausalLM": _LAYOUT.format("Phi4MultimodalForCausalLM"),
        "PixtralForConditionalGeneration": _LAYOUT.format("LlavaForConditionalGeneration"),
        "PixtralVisionModel": (
            "it is an encoder without a text part; with one, it is LlavaForConditionalGeneration"
        ),
        "Qwen4ExpForConditionalGeneration": "it keeps recurrent states in a way of its own",
        "Step3p7ForConditionalGeneration": "only its text part is served: Step3p5ForCausalLM",
        **_all(
            "transformers has no causal model of its text part, and Sylvan has none either",
            (
                "Cosmos3EdgeForConditionalGeneration",
                "MuseGlimmerForConditionalGeneration",
                "MuseSparkForConditionalGeneration",
                "UnlimitedOcrForConditionalGeneration",
                "UnlimitedOCRForCausalLM",
            ),
        ),
        **_all(
            _UNKNOWN,
            (
                *("BailingMM2NativeForConditionalGeneration", "DotsVLMForCausalLM"),
                *("BailingMMNativeForConditionalGeneration", "DotsOCRForCausalLM"),
                *("BailingMoeV3VLForConditionalGeneration", "InternS1ForConditionalGeneration"),
                *("Cosmos3ForConditionalGeneration", "InternS1ProForConditionalGeneration"),
                *("InternS2MobiusForConditionalGeneration", "JetVLMForConditionalGeneration"),
                *("InternS2PreviewForConditionalGeneration", "KimiK3ForConditionalGeneration"),
                *("LocateAnythingForConditionalGeneration", "MiDashengLMModel"),
                *("MiMoV2ASRForCausalLM", "MossVLForConditionalGeneration"),
                *("NVILAForConditionalGeneration", "NVILALiteForConditionalGeneration"),
                *("POINTSV15ChatModel", "Sarashina2VisionForCausalLM", "YiVLForCausalLM"),
                *("Step3VLForConditionalGeneration", "StepVLForConditionalGeneration"),
            ),
        ),
    }
)
"""Architecture -> why it is not served; the rest of `NAME cannot be served: ...`."""
