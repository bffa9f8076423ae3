"""Multimodal architectures that are not served, with the reason for the error message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

_LAYOUT = "its checkpoint layout is not supported; converted to transformers' it is served as {}"
_UNKNOWN = "neither Sylvan nor the installed transformers has it"
_RECURRENT = "its images cannot be divided among recurrent layers"


def _all(reason: str, names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(names, reason)


REFUSED_MEDIA: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekOCRForCausalLM": "its successor is served: DeepseekOcr2ForConditionalGeneration",
        "DeepseekVL2ForCausalLM": "checkpoints name it DeepseekVLV2ForCausalLM, which is served",
        "Ernie4_5_VLMoeForConditionalGeneration": (
            "its experts are chosen by whether a token belongs to a text or to an image"
        ),
        "Glm5NextForConditionalGeneration": _RECURRENT,
        "GlmImageForConditionalGeneration": "it draws images: its tokens are parts of them",
        "InklingForConditionalGeneration": "it masks or biases attention in a way of its own",
        "KimiK25ForConditionalGeneration": _LAYOUT.format("Kimi_K25ForConditionalGeneration"),
        "LlavaLlamaForCausalLM": _LAYOUT.format("LlavaForConditionalGeneration"),
        "LlavaMistralForCausalLM": _LAYOUT.format("LlavaNextForConditionalGeneration"),
        "LlavaQwenForCausalLM": _LAYOUT.format("LlavaOnevisionForConditionalGeneration"),
        "LlavaVidForCausalLM": _LAYOUT.format("LlavaNextVideoForConditionalGeneration"),
        "MiniCPMO": "of the family, MiniCPM-V 2.6 and 4.6 are served",
        "MiniCPMV4_7ForConditionalGeneration": (
            "the positions of its images on a canvas are not computed; 4.6 is served"
        ),
        "MiniMaxM3SparseForConditionalGeneration": (
            "only its text part is served: MiniMaxM3VLForCausalLM"
        ),
        "Molmo2ForConditionalGeneration": (
            "tokens of all images of a prompt see each other, so that no image could be cached"
        ),
        "MolmoForCausalLM": _UNKNOWN,
        "MultiModalityCausalLM": _LAYOUT.format("JanusForConditionalGeneration"),
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
"""Architecture -> the reason in `NAME cannot be served: REASON`."""
