"""Maps architectures (as in config.json) to the modules that serve them.

To add a family, write a module in this package and add a line to `MODELS`, or register an entry
point in another package. `choose_path` decides between native code and transformers.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec
import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig, NotNative, architecture_of, read_config
from sylvan.runtime.models.image_tokens import with_image_token
from sylvan.runtime.models.unsupported import UNSUPPORTED

_HERE = "sylvan.runtime.models."
PLUGINS = "sylvan.models"
"""Entry-point group for families of other packages: architecture = module."""

MODELS: dict[str, str] = {
    "AXK1ForCausalLM": _HERE + "deepseek",
    "ApertusForCausalLM": _HERE + "variants",
    "AquilaForCausalLM": _HERE + "renamed",
    "ArceeForCausalLM": _HERE + "stablelm",
    "AriaTextForCausalLM": _HERE + "moe",
    "BaiChuanForCausalLM": _HERE + "internlm2",
    "BaichuanForCausalLM": _HERE + "internlm2",
    "BailingMoeForCausalLM": _HERE + "bailing",
    "BailingMoeV2ForCausalLM": _HERE + "bailing",
    "BambaForCausalLM": _HERE + "mamba",
    "BartForCausalLM": _HERE + "bart",
    "BartForConditionalGeneration": _HERE + "encoder_decoder",
    "BertGenerationDecoder": _HERE + "bert_decoder",
    "BertLMHeadModel": _HERE + "bert_decoder",
    "BioGptForCausalLM": _HERE + "gptneo",
    "BitNetForCausalLM": _HERE + "variants",
    "BlenderbotForCausalLM": _HERE + "bart",
    "BlenderbotForConditionalGeneration": _HERE + "encoder_decoder",
    "BlenderbotSmallForCausalLM": _HERE + "bart",
    "BlenderbotSmallForConditionalGeneration": _HERE + "encoder_decoder",
    "BloomForCausalLM": _HERE + "alibi",
    "CamembertForCausalLM": _HERE + "bert_decoder",
    "ChatGLMForConditionalGeneration": _HERE + "chatglm",
    "ChatGLMModel": _HERE + "chatglm",
    "CodeGenForCausalLM": _HERE + "gptneo",
    "Cohere2ForCausalLM": _HERE + "cohere",
    "CohereForCausalLM": _HERE + "cohere",
    "CwmForCausalLM": _HERE + "llama",
    "Data2VecTextForCausalLM": _HERE + "bert_decoder",
    "DbrxForCausalLM": _HERE + "dbrx",
    "DeciLMForCausalLM": _HERE + "nas",
    "DeepseekForCausalLM": _HERE + "moe",
    "DeepseekV2ForCausalLM": _HERE + "deepseek",
    "DeepseekV32ForCausalLM": _HERE + "sparse_latent",
    "DeepseekV3ForCausalLM": _HERE + "deepseek",
    "DeepseekV4ForCausalLM": _HERE + "deepseek4",
    "DeepseekVLV2ForCausalLM": _HERE + "published_media",
    "Dots1ForCausalLM": _HERE + "moe",
    "DreamModel": _HERE + "llama",
    "ElectraForCausalLM": _HERE + "bert_decoder",
    "Ernie4_5ForCausalLM": _HERE + "llama",
    "Ernie4_5_MoeForCausalLM": _HERE + "moe",
    "ErnieForCausalLM": _HERE + "bert_decoder",
    "Exaone4ForCausalLM": _HERE + "olmo",
    "ExaoneForCausalLM": _HERE + "renamed",
    "ExaoneMoeForCausalLM": _HERE + "sigmoid_moe",
    "FalconForCausalLM": _HERE + "gpt2",
    "FalconMambaForCausalLM": _HERE + "mamba",
    "FlexOlmoForCausalLM": _HERE + "moe",
    "Florence2ForConditionalGeneration": _HERE + "encoder_decoder",
    "FlintForCausalLM": _HERE + "sigmoid_moe",
    "GPT2LMHeadModel": _HERE + "gpt2",
    "GPTBigCodeForCausalLM": _HERE + "gpt2",
    "GPTJForCausalLM": _HERE + "gpt2",
    "GPTNeoForCausalLM": _HERE + "gptneo",
    "GPTNeoXForCausalLM": _HERE + "gpt2",
    "GPTNeoXJapaneseForCausalLM": _HERE + "gptneo",
    "Gemma2ForCausalLM": _HERE + "gemma",
    "Gemma3ForCausalLM": _HERE + "gemma",
    "GemmaForCausalLM": _HERE + "gemma",
    "Glm4ForCausalLM": _HERE + "glm",
    "Glm4MoeForCausalLM": _HERE + "moe",
    "Glm4MoeLiteForCausalLM": _HERE + "deepseek",
    "GlmForCausalLM": _HERE + "glm",
    "GlmMoeDsaForCausalLM": _HERE + "sparse_latent",
    "GptOssForCausalLM": _HERE + "moe",
    "GraniteForCausalLM": _HERE + "llama",
    "GraniteMoeForCausalLM": _HERE + "granite",
    "GraniteMoeHybridForCausalLM": _HERE + "mamba",
    "GraniteMoeSWAForCausalLM": _HERE + "granite",
    "GraniteMoeSharedForCausalLM": _HERE + "granite",
    "GraniteSWAForCausalLM": _HERE + "granite",
    "Grok1ModelForCausalLM": _HERE + "grok",
    "HYV3ForCausalLM": _HERE + "sigmoid_moe",
    "HeliumForCausalLM": _HERE + "llama",
    "HunYuanDenseV1ForCausalLM": _HERE + "llama",
    "HunYuanMoEV1ForCausalLM": _HERE + "moe",
    "HyperCLOVAXForCausalLM": _HERE + "granite",
    "InternLM2ForCausalLM": _HERE + "internlm2",
    "InternLM3ForCausalLM": _HERE + "renamed",
    "InternLMForCausalLM": _HERE + "renamed",
    "Jais2ForCausalLM": _HERE + "stablelm",
    "JambaForCausalLM": _HERE + "mamba",
    "JetMoeForCausalLM": _HERE + "jetmoe",
    "Lfm2ForCausalLM": _HERE + "hybrid",
    "Lfm2MoeForCausalLM": _HERE + "hybrid",
    "Llama4ForCausalLM": _HERE + "llama4",
    "InternVLChatModel": _HERE + "published_media",
    "KimiLinearForCausalLM": _HERE + "kimi_linear",
    "KimiVLForConditionalGeneration": _HERE + "published_media",
    "K2HorizonForCausalLM": _HERE + "xllm",
    "LightOnOCRForConditionalGeneration": _HERE + "multimodal",
    "LLaDA2MoeModelLM": _HERE + "bailing",
    "LLaDAMoEModelLM": _HERE + "moe",
    "LLaDAModelLM": _HERE + "llada",
    "LlamaForCausalLM": _HERE + "llama",
    "LongcatFlashForCausalLM": _HERE + "longcat",
    "M2M100ForConditionalGeneration": _HERE + "encoder_decoder",
    "MBartForCausalLM": _HERE + "bart",
    "MBartForConditionalGeneration": _HERE + "encoder_decoder",
    "MT5ForConditionalGeneration": _HERE + "t5",
    "Mamba2ForCausalLM": _HERE + "mamba",
    "MambaForCausalLM": _HERE + "mamba",
    "MarianForCausalLM": _HERE + "bart",
    "MarianMTModel": _HERE + "encoder_decoder",
    "MegatronBertForCausalLM": _HERE + "bert_decoder",
    "MellumForCausalLM": _HERE + "moe",
    "MiMoForCausalLM": _HERE + "llama",
    "MiniCPM3ForCausalLM": _HERE + "deepseek",
    "MiniCPMForCausalLM": _HERE + "llama",
    "MiniCPMV": _HERE + "published_media",
    "MiniMaxForCausalLM": _HERE + "minimax",
    "MiniMaxM1ForCausalLM": _HERE + "minimax",
    "MiniMaxM2ForCausalLM": _HERE + "sigmoid_moe",
    "MiniMaxText01ForCausalLM": _HERE + "minimax",
    "Ministral3ForCausalLM": _HERE + "llama",
    "MinistralForCausalLM": _HERE + "llama",
    "Mistral4ForCausalLM": _HERE + "deepseek",
    "MistralForCausalLM": _HERE + "llama",
    "MistralLarge3ForCausalLM": _HERE + "deepseek",
    "MllamaForConditionalGeneration": _HERE + "mllama",
    "MixtralForCausalLM": _HERE + "moe",
    "MptForCausalLM": _HERE + "alibi",
    "MvpForCausalLM": _HERE + "bart",
    "MvpForConditionalGeneration": _HERE + "encoder_decoder",
    "NanbeigeForCausalLM": _HERE + "nanbeige",
    "NanoChatForCausalLM": _HERE + "variants",
    "NemotronForCausalLM": _HERE + "stablelm",
    "OPTForCausalLM": _HERE + "gpt2",
    "Olmo2ForCausalLM": _HERE + "olmo",
    "Olmo3ForCausalLM": _HERE + "olmo",
    "OlmoForCausalLM": _HERE + "llama",
    "OlmoeForCausalLM": _HERE + "moe",
    "OpenAIGPTLMHeadModel": _HERE + "gpt1",
    "OrionForCausalLM": _HERE + "renamed",
    "PLBartForCausalLM": _HERE + "bart",
    "PLBartForConditionalGeneration": _HERE + "encoder_decoder",
    "PegasusForCausalLM": _HERE + "bart",
    "PegasusForConditionalGeneration": _HERE + "encoder_decoder",
    "Phi3ForCausalLM": _HERE + "phi3",
    "Phi3SmallForCausalLM": _HERE + "phi3small",
    "PhiForCausalLM": _HERE + "gpt2",
    "Phi3VForCausalLM": _HERE + "published_media",
    "Phi4MultimodalForCausalLM": _HERE + "multimodal",
    "PhiMoEForCausalLM": _HERE + "moe",
    "PhimoeForCausalLM": _HERE + "moe",
    "QWenLMHeadModel": _HERE + "qwen1",
    "Qwen2ForCausalLM": _HERE + "llama",
    "Qwen2MoeForCausalLM": _HERE + "moe",
    "Qwen3ForCausalLM": _HERE + "llama",
    "Qwen3MoeForCausalLM": _HERE + "moe",
    "Qwen3NextForCausalLM": _HERE + "hybrid",
    "Qwen3_5ForCausalLM": _HERE + "hybrid",
    "Qwen3_5MoeForCausalLM": _HERE + "hybrid",
    "RecurrentGemmaForCausalLM": _HERE + "recurrent_gemma",
    "RemBertForCausalLM": _HERE + "bert_decoder",
    "RoFormerForCausalLM": _HERE + "bert_decoder",
    "RobertaForCausalLM": _HERE + "bert_decoder",
    "RobertaPreLayerNormForCausalLM": _HERE + "bert_decoder",
    "RWKV7ForCausalLM": _HERE + "rwkv7",
    "Rwkv5ForCausalLM": _HERE + "rwkv6",
    "Rwkv6ForCausalLM": _HERE + "rwkv6",
    "RwkvForCausalLM": _HERE + "rwkv",
    "SDARForCausalLM": _HERE + "llama",
    "SDARMoeForCausalLM": _HERE + "moe",
    "SeedOssForCausalLM": _HERE + "llama",
    "SmolLM3ForCausalLM": _HERE + "llama",
    "SolarForCausalLM": _HERE + "solar",
    "SolarOpenForCausalLM": _HERE + "moe",
    "Spark2_5ForCausalLM": _HERE + "spark",
    "StableLmForCausalLM": _HERE + "stablelm",
    "Starcoder2ForCausalLM": _HERE + "stablelm",
    "Step3p5ForCausalLM": _HERE + "step",
    "T5ForConditionalGeneration": _HERE + "t5",
    "TeleFLMForCausalLM": _HERE + "renamed",
    "TrOCRForCausalLM": _HERE + "bart",
    "UMT5ForConditionalGeneration": _HERE + "t5",
    "VaultGemmaForCausalLM": _HERE + "gemma",
    "WhisperForConditionalGeneration": _HERE + "whisper",
    "XGLMForCausalLM": _HERE + "gptneo",
    "XLMRobertaForCausalLM": _HERE + "bert_decoder",
    "XLMRobertaXLForCausalLM": _HERE + "bert_decoder",
    "XllmForCausalLM": _HERE + "xllm",
    "XverseForCausalLM": _HERE + "renamed",
    "XverseMoeForCausalLM": _HERE + "moe",
    "YiForCausalLM": _HERE + "renamed",
    "YoutuForCausalLM": _HERE + "deepseek",
    "ZambaForCausalLM": _HERE + "zamba",
    "xLSTMForCausalLM": _HERE + "xlstm",
}

_MULTIMODAL = (
    *("Aria", "AyaVision", "Cohere2Vision", "DeepseekOcr2", "DeepseekVL", "DeepseekVLHybrid"),
    *("Exaone4_5_", "Gemma3", "GlmAsr", "Glm46V", "Glm4v", "Glm4vMoe", "GlmOcr", "GotOcr2"),
    *("GraniteDocling", "GraniteSpeech", "GraniteSpeechPlus", "HyperCLOVAXVisionV2", "Idefics2"),
    *("Idefics3", "InternVL", "Janus", "Kimi_K25", "Lfm2Vl", "LightOnOcr", "Llama4", "Llava"),
    *(
        "LlavaNext",
        "LlavaNextVideo",
        "LlavaOnevision",
        "MiniCPMOcr",
        "MiniCPMV4_6",
        "Mistral3",
        "Ovis2",
    ),
    *("PaddleOCRVL", "PaliGemma", "QianfanOCR", "Qwen2Audio", "Qwen2VL", "Qwen2_5Omni"),
    *("Qwen2_5OmniThinker", "Qwen2_5_VL", "Qwen3ASR", "Qwen3OmniMoe", "Qwen3OmniMoeThinker"),
    *("Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "SmolVLM", "VideoLlama3", "VideoLlava"),
    *("VipLlava", "Voxtral"),
)
_WEIGHED = "ForSequenceClassificationWithNormal_Weights"
_ENCODERS = (
    *("Bert", "Camembert", "Data2VecText", "DistilBert", "Electra", "Ernie", "Gte", "ModernBert"),
    *("NomicBert", "Roberta", "XLMRoberta"),
)
_DECODERS = (
    *("Arcee", "DeepseekV2", "DeepseekV3", "Exaone4", "Falcon", "GPT2", "GPTBigCode", "GPTJ"),
    *("GPTNeoX", "Gemma", "Gemma2", "Gemma3Text", "Glm", "Glm4", "GptOss", "Helium", "Llama"),
    *("Ministral", "Mistral", "Mixtral", "Nemotron", "OPT", "Olmo2", "Olmo3", "Phi", "Phi3"),
    *("Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SeedOss", "SmolLM3", "StableLm", "Starcoder2"),
)
MODELS |= {
    f"{stem}{suffix}": _HERE + module
    for stems, module, suffixes in (
        (_ENCODERS, "encoder", ("ForMaskedLM", "ForSequenceClassification", "Model")),
        (_DECODERS, "pooling_models", ("ForSequenceClassification", "Model")),
        (_MULTIMODAL, "multimodal", ("ForConditionalGeneration",)),
        (("InternLM2", "Qwen2", "Qwen3"), "pooling_models", ("ForRewardModel",)),
        (("Qwen2",), "pooling_models", ("ForProcessRewardModel",)),
        (("Cohere", "Cohere2", "EuroBert", "Granite"), "pooling_models", ("Model",)),
        (("LlamaBidirectional", "LlamaEmbedding"), "pooling_models", ("Model",)),
        (("Llama",), "pooling_models", ("ForClassification", _WEIGHED)),
        (("Contriever",), "encoder", ("",)),
        (("CLIP",), "clip", ("Model", "TextModel", "TextModelWithProjection")),
        (("Siglip", "Siglip2"), "siglip", ("Model", "TextModel")),
        (("ColModernVBert", "ColPali", "ColQwen2"), "retrieval", ("ForRetrieval",)),
    )
    for stem in stems
    for suffix in suffixes
}


@runtime_checkable
class Model(Protocol):
    """A model as runners and loader see it; in practice an `nn.Module`.

    The three methods also accept traced tensors, and then emit ops.
    """

    fused: ClassVar[Mapping[str, tuple[str, ...]]]
    """Last part of a module's name -> names of the checkpoint tensors that it joins, in order."""

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Token embeddings. Shape: float32 (T, D)."""
        ...

    def forward(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Hidden vectors after the final norm. Shape: (T, D)."""
        ...

    def head(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits of selected rows. Shape: float32 (R, V)."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Exports of a model module: `parse(raw)` of config.json, and the class."""

    parse: Callable[[dict[str, Any]], ModelConfig]
    model: Callable[[ModelConfig, Build], torch.nn.Module]


@dataclass(frozen=True, slots=True)
class ServingPath:
    """How a checkpoint is served (`config.path`: native code or transformers), and why."""

    config: ModelConfig
    why: str


def load_family(architecture: str) -> ModelFamily:
    """Import the module that serves `architecture`; it defines `parse` and `MODEL`.

    Raises:
        ConfigError: no family serves it; lists the supported ones.
    """
    if architecture not in MODELS:
        if found := _plugin(architecture):
            module: Any = found.load()
            return ModelFamily(module.parse, module.MODEL)
        close = difflib.get_close_matches(architecture, MODELS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(
            f"the architecture {architecture!r} is not supported{hint}; "
            f"supported are {', '.join(sorted(MODELS))}"
        )
    module = importlib.import_module(MODELS[architecture])
    return ModelFamily(module.parse, module.MODEL)


def _plugin(architecture: str) -> EntryPoint | None:
    """A family of another installed package: its entry point names the module."""
    return next(iter(entry_points(group=PLUGINS, name=architecture)), None)


def load_config(model_dir: Path, *, headless: bool = False, trusted: bool = False) -> ModelConfig:
    """Read and check config.json of a checkpoint.

    Args:
        model_dir: The checkpoint.
        headless: Omit the head of a generative model, to serve embeddings.
        trusted: Whether Python files of the checkpoint may run.

    Raises:
        ConfigError: The model is not supported.
    """
    raw = with_image_token(read_config(model_dir), model_dir)
    config = choose_path(raw, model_dir if trusted else None).config
    if headless and config.head == "lm":
        config = msgspec.structs.replace(config, head="none")
    return config


def choose_path(raw: dict[str, Any], code: Path | None = None) -> ServingPath:
    """Choose native code if it supports the family and all switches, else transformers.

    Args:
        raw: config.json.
        code: Directory of the checkpoint, if its Python files may run.

    Raises:
        ConfigError: Neither supports it.
    """
    architecture = architecture_of(raw)
    lack = "no native file serves it"
    if architecture in MODELS or _plugin(architecture):
        try:
            return ServingPath(load_family(architecture).parse(raw), "a native family")
        except NotNative as error:
            lack = f"its native file lacks {error}"
    try:
        return ServingPath(load_fallback(code).parse(raw), lack)
    except ConfigError as error:
        if reason := UNSUPPORTED.get(architecture):
            raise ConfigError(f"{architecture} cannot be served: {reason}") from None
        if architecture not in MODELS and "model_type" not in raw:
            load_family(architecture)  # raises, with what is supported
        raise ConfigError(f"{architecture} cannot be served: {lack}, and {error}") from None


def family_of(config: ModelConfig) -> ModelFamily:
    """Constructor for a parsed config."""
    return load_family(config.architecture) if config.path == "native" else load_fallback()


def load_fallback(code: Path | None = None) -> ModelFamily:
    """The family for all other models, through transformers and trusted code."""
    module = importlib.import_module(_HERE + "fallback")
    return ModelFamily(partial(module.parse, code=code), module.MODEL)
