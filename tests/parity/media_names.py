"""Names of models that see or hear in SGLang, and how each is answered here."""

from __future__ import annotations

from sylvan.runtime.models.refused_media import REFUSED_MEDIA
from sylvan.runtime.models.registry import MODELS

SEEING = [
    "LlavaLlamaForCausalLM",
    "LlavaQwenForCausalLM",
    "LlavaMistralForCausalLM",
    "LlavaForConditionalGeneration",
    "LlavaVidForCausalLM",
    "MllamaForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "PixtralForConditionalGeneration",
    "PixtralVisionModel",
    "LightOnOCRForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Phi4MMForCausalLM",
    "DeepseekVL2ForCausalLM",
    "DeepseekOCRForCausalLM",
    "UnlimitedOCRForCausalLM",
    "MultiModalityCausalLM",
    "InternVLChatModel",
    "InternS1ForConditionalGeneration",
    "InternS1ProForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "Glm5NextForConditionalGeneration",
    "GlmImageForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "MiniCPMV",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "NVILAForConditionalGeneration",
    "NVILALiteForConditionalGeneration",
    "JetVLMForConditionalGeneration",
    "NemotronH_Nano_VL_V2",
    "Ernie4_5_VLMoeForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "DotsVLMForCausalLM",
    "DotsOCRForCausalLM",
    "PaddleOCRVLForConditionalGeneration",
    "POINTSV15ChatModel",
    "Sarashina2VisionForCausalLM",
    "Step3VLForConditionalGeneration",
    "StepVLForConditionalGeneration",
    "Step3p7ForConditionalGeneration",
    "YiVLForCausalLM",
    "Lfm2VlForConditionalGeneration",
    "MossVLForConditionalGeneration",
    "LocateAnythingForConditionalGeneration",
    "BailingMoeV3VLForConditionalGeneration",
    "MuseGlimmerForConditionalGeneration",
    "Cosmos3ForConditionalGeneration",
    "Cosmos3EdgeForConditionalGeneration",
]
HEARING = [
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "MiniCPMO",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Omni_Reasoning_V3",
    "BailingMMNativeForConditionalGeneration",
    "BailingMM2NativeForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
    "InklingForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "VoxtralForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "MiMoV2ASRForCausalLM",
    "MiDashengLMModel",
]
BY_TRANSFORMERS = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
TEXTS = ("Gemma3nForConditionalGeneration",)


def answer(name: str) -> str:
    """How a name is answered; raises KeyError if it has no answer."""
    if name in MODELS:
        return "served"
    if name in BY_TRANSFORMERS:
        return "served; transformers computes the text part"
    if name in TEXTS:
        return "texts only: its eyes are a network of timm"
    return f"refused: {REFUSED_MEDIA[name]}"
