"""Tiny random models of images and text with processors built here, and files of examples. Offline, seconds."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers as tk
import torch
import transformers as t
from PIL import Image
from torch import Tensor, nn

import rankfold
from families import GQA
from rankfold import DenseModel
from rankfold.data.batches import Example
from versions import needs_image_processors

SPECIAL = ["<unk>", "<pad>", "<s>", "</s>"]
CHARACTERS = ["\n", *map(chr, range(32, 123))]
MARKS = {
    "image_token": "<image>",
    "fake_token": "<fake_token_around_image>",
    "global_token": "<global-img>",
    "end_token": "<end_of_utterance>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
PLACE = len(SPECIAL) + len(CHARACTERS)  # the id of <image>
TEXT = GQA | {"vocab_size": 112, "max_position_embeddings": 512}
SEES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "intermediate_size": 16}
# Turns as chat templates write them; the image token is the processor's own.
TEMPLATE = (
    "{% for turn in messages %}[{{ turn['role'] }}]{% for part in turn['content'] %}{% if part['type'] == 'image' "
    "%}MARK{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


class Family(NamedTuple):
    """A model and what makes its inputs; ``None``: no processor can be built without torchvision."""

    model: type
    config: object
    processor: object | None


def tokenizer() -> t.PreTrainedTokenizerFast:
    """One token a character."""
    model = tk.models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *CHARACTERS])}, unk_token="<unk>")
    fast = tk.Tokenizer(model)
    fast.pre_tokenizer = tk.pre_tokenizers.Split("", "isolated")
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return t.PreTrainedTokenizerFast(tokenizer_object=fast, extra_special_tokens=MARKS, **names)


def _llava() -> t.LlavaProcessor:
    images = t.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28)
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return t.LlavaProcessor(images, tokenizer(), chat_template=TEMPLATE.replace("MARK", "<image>"), **options)


def _next() -> t.LlavaNextProcessor:
    """Cuts an image by its shape."""
    sizes = {"size": {"shortest_edge": 28}, "crop_size": 28, "image_grid_pinpoints": [[28, 56], [56, 28]]}
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    images, template = t.LlavaNextImageProcessorPil(**sizes), TEMPLATE.replace("MARK", "<image>")
    return t.LlavaNextProcessor(images, tokenizer(), chat_template=template, **options)


def _idefics() -> t.Idefics3Processor:
    """Cuts an image into as many pieces as it is large."""
    needs_image_processors()
    images = t.Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return t.Idefics3Processor(images, tokenizer(), image_seq_len=4, chat_template=TEMPLATE.replace("MARK", "<image>"))


def _gemma() -> t.Gemma3Processor:
    """Without a chat template."""
    images = t.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return t.Gemma3Processor(images, tokenizer(), image_seq_length=4)


PATCHES = {
    "depth": 1,
    "num_heads": 2,
    "patch_size": 7,
    "hidden_size": 16,
    "intermediate_size": 16,
    "out_hidden_size": 32,
}
PLACES = {"image_token_id": PLACE, "vision_start_token_id": 108, "vision_end_token_id": 109, "video_token_id": 110}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
QWEN3 = {"text_config": TEXT | ROPE | {"head_dim": 8}, "vision_config": PATCHES | {"deepstack_visual_indexes": [0]}}
IDEFICS = {"text_config": TEXT | {"model_type": "llama"}, "vision_config": SEES | {"patch_size": 7}, "scale_factor": 2}


def _llama_and_clip() -> dict:
    return {"text_config": t.LlamaConfig(**TEXT), "vision_config": t.CLIPVisionConfig(**SEES, patch_size=14)}


FAMILIES = {
    "llava": Family(
        t.LlavaForConditionalGeneration,
        lambda: t.LlavaConfig(**_llama_and_clip(), image_token_id=PLACE, image_seq_length=4),
        _llava,
    ),
    "llava_next": Family(
        t.LlavaNextForConditionalGeneration,
        lambda: t.LlavaNextConfig(**_llama_and_clip(), image_token_id=PLACE, image_grid_pinpoints=[[28, 56], [56, 28]]),
        _next,
    ),
    "idefics3": Family(
        t.Idefics3ForConditionalGeneration,
        lambda: t.Idefics3Config(**IDEFICS, image_token_id=PLACE, pad_token_id=1),
        _idefics,
    ),
    "gemma3": Family(
        t.Gemma3ForConditionalGeneration,
        lambda: t.Gemma3Config(
            text_config={**TEXT, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8},
            vision_config=SEES | {"patch_size": 14},
            image_token_index=PLACE,
            mm_tokens_per_image=4,
        ),
        _gemma,
    ),
    "qwen2_5_vl": Family(
        t.Qwen2_5_VLForConditionalGeneration,
        lambda: t.Qwen2_5_VLConfig(text_config=TEXT | ROPE, vision_config=PATCHES, **PLACES),
        None,
    ),
    "qwen3_vl": Family(
        t.Qwen3VLForConditionalGeneration, lambda: t.Qwen3VLConfig(**QWEN3, **PLACES), None
    ),  # adds its images to the stream after the first block, too
}


def tiny_model(family: str) -> nn.Module:
    """Weights large enough that every path matters, that of images too."""
    torch.manual_seed(0)
    model = FAMILIES[family].model(FAMILIES[family].config()).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=0.2)
    return model


def opened(family: str) -> DenseModel:
    """Its blocks run in fp32."""
    source = rankfold.open_model(tiny_model(family), device="cpu")
    source.autocast = None
    return source


def picture(number: int) -> Image.Image:
    """Noise, of sizes that differ."""
    shape = (20 + 9 * (number % 5), 24 + 13 * (number % 3), 3)
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8))


def save_llava(folder: Path) -> None:
    """Write a model with its processor, which can be read again."""
    needs_image_processors()
    tiny_model("llava").save_pretrained(folder)
    FAMILIES["llava"].processor().save_pretrained(folder)


def write_pairs(folder: Path, rows: int = 16) -> Path:
    """Questions of different lengths: most with an image, some with two, some with none."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(rows):
        names = [f"images/{number}-{i}.png" for i in range((1, 2, 1, 0)[number % 4])]
        for i, name in enumerate(names):
            picture(10 * number + i).save(folder / name)
        row = {"question": f"what is in {'it ' * (number % 6)}{number}?", "answer": f"a thing {number * 7}"}
        lines.append(row | {"image": (names if len(names) > 1 else names[0]) if names else None})
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in lines))
    return file


def by_hand(seed: int, images: int, length: int) -> dict[str, Tensor]:
    """Inputs of a Qwen-VL model, whose processor wants torchvision: images of 4 and 2 tokens, then text."""
    generator = torch.Generator().manual_seed(seed)
    grids, ids = [[1, 4, 4], [1, 2, 4]][:images], [5]
    for _, height, width in grids:
        ids += [108, *[PLACE] * (height * width // 4), 109]
    words = torch.randint(5, PLACE, (length,), generator=generator).tolist()
    found = {"input_ids": torch.tensor([[*ids, *words]])}
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    found["mm_token_type_ids"] = (found["input_ids"] == PLACE).long()
    if images:
        patches = sum(height * width for _, height, width in grids)
        found["pixel_values"] = torch.randn(patches, 3 * 2 * 7 * 7, generator=generator)
        found["image_grid_thw"] = torch.tensor(grids)
    return found


def examples_of(family: str, source: DenseModel, folder: Path, samples: int = 12) -> rankfold.CalibrationData:
    """By the family's processor where there is one."""
    if make := FAMILIES[family].processor:
        file = write_pairs(folder, samples + 4)
        return rankfold.load_calibration(file, source, num_samples=samples, tokenizer=make())
    rows = tuple(Example.of(by_hand(seed, (1, 2, 0)[seed % 3], 9 + 2 * seed)) for seed in range(samples + 2))
    return rankfold.CalibrationData(rows[:samples], "x", "x", 0, rows[samples:])
