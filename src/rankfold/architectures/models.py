"""The models that people name, and the family of each of their parts: one list for the command and the documents."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["decoder", "experts", "encoder", "images and text"]


@dataclass(frozen=True)
class NamedModel:
    """A model that transformers has, by its name and its ``model_type``."""

    name: str
    model_type: str
    kind: Kind
    parts: Mapping[str, str] = field(default_factory=dict)  # part -> `model_type` of its family, as by default

    def __post_init__(self):
        if not self.parts:
            object.__setattr__(self, "parts", {"language": self.model_type})


def _all(kind: Kind, names: Mapping[str, str]) -> tuple[NamedModel, ...]:
    return tuple(NamedModel(name, model_type, kind) for model_type, name in names.items())


def _sees(name: str, model_type: str, language: str, vision: str, *, projector: bool = False) -> NamedModel:
    parts = {"language": language, "vision": vision}
    return NamedModel(name, model_type, "images and text", parts | ({"projector": "projector"} if projector else {}))


DECODERS = {
    "llama": "Llama, SmolLM and SmolLM2",
    "smollm3": "SmolLM3",
    "mistral": "Mistral",
    "ministral3": "Ministral 3",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 for text",
    "gemma4_text": "Gemma 4 for text",
    "phi": "Phi",
    "phi3": "Phi-3",
    "granite": "Granite",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "cohere": "Command R",
    "cohere2": "Command R7B",
    "glm": "GLM",
    "glm4": "GLM 4",
    "exaone4": "EXAONE 4",
    "lfm2": "LFM2",
    "bamba": "Bamba",
    "falcon_h1": "Falcon-H1",
    "ernie4_5": "ERNIE 4.5",
    "seed_oss": "Seed-OSS",
    "helium": "Helium",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder 2",
    "arcee": "Arcee",
    "nemotron": "Nemotron",
    "apertus": "Apertus",
    "opt": "OPT",
    "gpt2": "GPT-2",
    "gptj": "GPT-J",
    "gpt_neo": "GPT-Neo",
    "gpt_neox": "GPT-NeoX and Pythia",
    "falcon": "Falcon",
    "bloom": "BLOOM",
    "mpt": "MPT",
}
EXPERTS = {
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "granitemoe": "Granite-MoE",
    "granitemoehybrid": "Granite 4",
    "olmoe": "OLMoE",
    "flex_olmo": "FlexOlmo",
    "gpt_oss": "GPT-OSS",
    "llama4_text": "Llama 4 for text",
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3",
    "glm4_moe": "GLM 4.5 to 4.7",
    "glm4_moe_lite": "GLM 4.7 Flash",
    "dots1": "dots.llm1",
    "ernie4_5_moe": "ERNIE 4.5 MoE",
    "minimax_m2": "MiniMax M2",
    "exaone_moe": "EXAONE MoE",
    "lfm2_moe": "LFM2-MoE",
    "jamba": "Jamba",
    "nemotron_h": "Nemotron-H and Nemotron 3 Nano",
}
ENCODERS = {
    "bert": "BERT",
    "roberta": "RoBERTa",
    "xlm-roberta": "XLM-R",
    "modernbert": "ModernBERT",
}
MODELS = (
    *_all("decoder", DECODERS),
    *_all("experts", EXPERTS),
    *_all("encoder", ENCODERS),
    NamedModel("ViT", "vit", "encoder", {"vision": "vit"}),
    NamedModel("DINOv2", "dinov2", "encoder", {"vision": "dinov2"}),
    NamedModel("CLIP", "clip", "encoder", {"language": "clip_text_model", "vision": "clip_vision_model"}),
    NamedModel("SigLIP", "siglip", "encoder", {"language": "siglip_text_model", "vision": "siglip_vision_model"}),
    _sees("LLaVA", "llava", "llama", "clip_vision_model", projector=True),
    _sees("LLaVA-NeXT", "llava_next", "llama", "clip_vision_model", projector=True),
    _sees("Idefics 3", "idefics3", "llama", "idefics3_vision"),
    _sees("SmolVLM", "smolvlm", "llama", "smolvlm_vision"),
    _sees("Qwen2-VL", "qwen2_vl", "qwen2_vl_text", "qwen2_vl_vision", projector=True),
    _sees("Qwen2.5-VL", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_vl_vision", projector=True),
    _sees("Qwen3-VL", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_vision", projector=True),
    _sees("Qwen3-VL-MoE", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_moe_vision", projector=True),
    _sees("Qwen3.5", "qwen3_5", "qwen3_5_text", "qwen3_5_vision", projector=True),
    _sees("Qwen3.5-MoE", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_moe_vision", projector=True),
    _sees("Gemma 3", "gemma3", "gemma3_text", "siglip_vision_model"),
    NamedModel("Mistral Small 3.1 and 3.2", "mistral3", "images and text", {"language": "mistral"}),
    NamedModel("Gemma 4", "gemma4", "images and text", {"language": "gemma4_text"}),
)
