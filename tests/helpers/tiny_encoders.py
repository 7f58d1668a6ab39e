"""Tiny random encoders of every family, with and without heads; one line each."""

import copy
from typing import NamedTuple

import torch
import transformers as t
from torch import Tensor, nn

import rankfold
from families import GQA, IDS, SHAPE, some_ids
from rankfold import CalibrationData, DenseModel
from rankfold.data.batches import Data, Example

SIZES = {k: v for k, v in SHAPE.items() if k not in ("vocab_size", "max_position_embeddings")}
PATCHES = {**SIZES, "image_size": 28, "patch_size": 7}
SPECIAL = {"cls_token_id": 1, "sep_token_id": 2}
TWO = {"text_config": {**SHAPE, **IDS}, "vision_config": PATCHES}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
ANY = {"depth": 3, "num_heads": 2, "patch_size": 7}  # images of any size
PLACES = {"image_token_id": 90, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93}
OUT = ANY | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
WINDOWS = OUT | {"window_size": 28, "fullatt_block_indexes": [1]}  # 16 patches see each other in blocks 0 and 2


def _after(tower: dict) -> dict:
    """The language model after a tower."""
    # A copy: Qwen3.5's config writes into the dictionary that it is given.
    return {"text_config": {**GQA, **IDS, **copy.deepcopy(ROPE)}, "vision_config": tower, **PLACES}


class Encoder(NamedTuple):
    """How one is made."""

    name: str  # of its class
    config: t.PretrainedConfig
    part: str | None = None  # where it has two


ENCODERS = {
    "bert": Encoder("BertModel", t.BertConfig(**SHAPE)),
    "bert-head": Encoder("BertForMaskedLM", t.BertConfig(**SHAPE)),
    "roberta-head": Encoder("RobertaForSequenceClassification", t.RobertaConfig(**SHAPE)),
    "xlm-roberta": Encoder("XLMRobertaModel", t.XLMRobertaConfig(**SHAPE)),
    "modernbert-head": Encoder(
        "ModernBertForMaskedLM", t.ModernBertConfig(**SHAPE, **IDS, **SPECIAL, local_attention=8)
    ),
    "vit-head": Encoder("ViTForImageClassification", t.ViTConfig(**PATCHES)),
    "dinov2": Encoder(
        "Dinov2Model",
        t.Dinov2Config(
            hidden_size=32, mlp_ratio=2, num_hidden_layers=3, num_attention_heads=4, image_size=28, patch_size=7
        ),
    ),
    "clip-text": Encoder("CLIPModel", t.CLIPConfig(**TWO, projection_dim=16), "language"),
    "clip-vision": Encoder("CLIPModel", t.CLIPConfig(**TWO, projection_dim=16), "vision"),
    "clip-vision-alone": Encoder("CLIPVisionModel", t.CLIPVisionConfig(**PATCHES)),
    "siglip-text": Encoder("SiglipModel", t.SiglipConfig(**TWO), "language"),
    "siglip-head": Encoder("SiglipForImageClassification", t.SiglipConfig(**TWO)),
    "qwen2-vl": Encoder(
        "Qwen2VLForConditionalGeneration",
        t.Qwen2VLConfig(**_after(ANY | {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2})),
        "vision",
    ),
    "qwen2.5-vl": Encoder("Qwen2_5_VLForConditionalGeneration", t.Qwen2_5_VLConfig(**_after(WINDOWS)), "vision"),
    "qwen3-vl": Encoder(
        "Qwen3VLForConditionalGeneration",
        t.Qwen3VLConfig(**_after(OUT | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64})),
        "vision",
    ),
    "qwen3.5": Encoder(
        "Qwen3_5ForConditionalGeneration", t.Qwen3_5Config(**_after(OUT | {"num_position_embeddings": 64})), "vision"
    ),
}


def tiny_encoder(family: str) -> nn.Module:
    """A random model; weights and biases large enough that every path matters."""
    torch.manual_seed(0)
    encoder = ENCODERS[family]
    model = getattr(t, encoder.name)(encoder.config)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.15)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def opened_encoder(family: str) -> DenseModel:
    """Open, its blocks run in fp32."""
    source = rankfold.open_model(tiny_encoder(family), device="cpu", component=ENCODERS[family].part)
    source.autocast = None
    return source


def packed(seed: int, *sizes: tuple[int, int]) -> Example:
    """Images of so many patches down and across, one after the other."""
    patches = sum(down * across for down, across in sizes)
    pixels = torch.randn(patches, 3 * 2 * 7 * 7, generator=torch.Generator().manual_seed(seed))
    return Example.of({"hidden_states": pixels, "grid_thw": torch.tensor([[1, *size] for size in sizes])})


def batch_of(source: DenseModel, rows: int = 2, seed: int = 0) -> Data:
    """Token ids, or pixels."""
    if source.part.packed:
        return (packed(seed, *[(4 + 2 * (row % 2), 6) for row in range(rows)]),)
    if not source.part.takes_images:
        return some_ids(rows, 24, seed)
    return torch.randn(rows, 3, 28, 28, generator=torch.Generator().manual_seed(seed))


def samples_of(source: DenseModel) -> CalibrationData:
    """To calibrate on, with as many held out as confirm a correction."""
    if source.part.packed:
        images = tuple(packed(seed, (2 + 2 * (seed % 3), 4 + 2 * (seed % 2))) for seed in range(32))
        return CalibrationData(images[:24], "random", "random", 0, images[24:], patches=20)
    fitted, held_out = batch_of(source, 24, 1), batch_of(source, 8, 2)
    if source.part.takes_images:
        return CalibrationData(fitted, "random", "random", 0, held_out, patches=16)
    return CalibrationData(fitted, "random", "random", 0, held_out)


@torch.no_grad()
def states(model: nn.Module, family: str, batch: Data, **options) -> Tensor:
    """``(B, T, D)`` after the last norm of a model of this family, by the model's own forward and no code of ours."""
    if not isinstance(batch, Tensor):
        return torch.cat([model.model.visual(**some.read()).last_hidden_state for some in batch])[None]
    tower = {"clip-text": "text_model", "siglip-text": "text_model", "clip-vision": "vision_model"}.get(family)
    tower = "vision_model" if family == "siglip-head" else tower
    network = getattr(model, tower) if tower else model.base_model
    return network(batch, **options).last_hidden_state
