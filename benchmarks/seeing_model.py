"""A model of LLaVA's architecture that answers benchmarks/picture_rows.py, for benchmarks/science_qa.py.

Its language model is SmolLM2-135M, its CLIP vision tower and its projector of two layers are new. These two first learn
words for what lies where, as CLIP learns from captions. Then the upper blocks of the language model learn to write the
right word and its letter. The processor is what transformers has for LLaVA, so it is used as any other such model.

Shape legend: B pictures or questions, T tokens, P places of a picture, H x W pixels, D width of the language model.
"""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers as t
from torch import Tensor, nn

import common
import picture_rows
import pictures
from picture_model import learn
from rankfold.evaluation.science_qa import LETTERS, prompt_of

IMAGE = "<empty_output>"  # a token of SmolLM2's vocabulary that no text has: its vocabulary does not grow
END = "<|im_end|>"
PATCH = 12
PLACES = (pictures.SIZE // PATCH) ** 2  # tokens of a picture
MEAN, DEVIATION = 0.25, 0.25  # of pixels in [0, 1]
SEES = {
    **{"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"image_size": pictures.SIZE, "patch_size": PATCH, "projection_dim": 64},
}
TRAINING = {
    "tower": {"steps": 150, "rate": 3e-3, "pictures": 128},
    "language": {"steps": 400, "rate": 3e-4, "questions": 16, "from_block": 10},
    "seed": 0,
}
ROUND = 16  # tokens: lengths of batches are multiples
TEMPLATE = (
    "{% for turn in messages %}{% if turn['role'] == 'user' %}USER: {% for part in turn['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "\n{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% else %} ASSISTANT: {{ turn['content'][0]['text'] }}" + END + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)
ASKED = "USER: {image}{question} ASSISTANT:"  # the same for one question


def processor(tokenizer) -> t.LlavaProcessor:
    tokenizer.image_token = IMAGE
    side = {"height": pictures.SIZE, "width": pictures.SIZE}
    images = t.CLIPImageProcessorPil(
        do_resize=False, crop_size=side, image_mean=[MEAN] * 3, image_std=[DEVIATION] * 3, do_center_crop=False
    )
    options = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return t.LlavaProcessor(images, tokenizer, chat_template=TEMPLATE, image_token=IMAGE, **options)


def untrained(language: nn.Module, image_token: int) -> t.LlavaForConditionalGeneration:
    """A new tower and projector before a language model, whose weights are taken over."""
    config = t.LlavaConfig(
        attn_implementation="eager",  # faster for short texts in bf16 on CPUs
        vision_config=t.CLIPVisionConfig(**SEES),
        text_config=language.config,
        image_token_id=image_token,
        image_seq_length=PLACES,
        vision_feature_layer=-1,  # all blocks of the tower are used
        tie_word_embeddings=True,
    )
    torch.manual_seed(TRAINING["seed"])
    model = t.LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(language.model.state_dict())  # the head is tied to its embeddings
    return model


def pixels_of(images: np.ndarray) -> Tensor:
    """``(B, 3, H, W)`` as the processor makes them of ``(B, H, W, 3)`` uint8."""
    return ((torch.from_numpy(images).float() / 255 - MEAN) / DEVIATION).permute(0, 3, 1, 2)


def answer_of(row: dict) -> str:
    """The word and then its letter, as LLaVA's model of ScienceQA gives its reason first."""
    return f"{row['choices'][row['answer']]}. The answer is {LETTERS[row['answer']]}"


def batch(asked: list[tuple[dict, np.ndarray | None]], tokenizer) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs and labels ``(B, T)``, -100 where nothing is to be learnt.

    Padding is after the text, where causal attention does not see it.
    """
    ids, labels = [], []
    for row, image in asked:
        shown = "" if image is None else IMAGE * PLACES + "\n"
        question = tokenizer.encode(ASKED.format(image=shown, question=prompt_of(row)), add_special_tokens=False)
        answer = tokenizer.encode(f" {answer_of(row)}{END}", add_special_tokens=False)
        ids.append(question + answer)
        labels.append([-100] * len(question) + answer)
    images = [image for _, image in asked if image is not None]
    inputs = {"input_ids": padded(ids, tokenizer.pad_token_id)}
    return inputs | ({"pixel_values": pixels_of(np.stack(images))} if images else {}), padded(labels, -100)


def padded(rows: list[list[int]], value: int) -> Tensor:
    """``(B, T)`` with few different T, because products of a new shape are slow the first time."""
    longest = -(-max(map(len, rows)) // ROUND) * ROUND
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def in_bf16(loss_of: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
    """The same loss, alone in a list, products in bf16."""

    def losses() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [loss_of()]

    return losses


def train(model: nn.Module, tokenizer) -> None:
    """First the tower and the projector, then with them as they are the upper blocks of the language model."""
    model.requires_grad_(False)
    seen = [model.model.vision_tower, model.model.multi_modal_projector]
    language = model.model.language_model.layers[TRAINING["language"]["from_block"] :]
    draw = random.Random(TRAINING["seed"])
    for modules, loss_of, how in (
        (seen, of_tower(model, tokenizer, draw), TRAINING["tower"]),
        (language, of_answers(model, tokenizer, draw), TRAINING["language"]),
    ):
        parameters = [p.requires_grad_() for module in modules for p in module.parameters()]
        learn(parameters, how["steps"], in_bf16(loss_of), rate=how["rate"], decay=0.01, warm_up=0.1, every=20)
        model.requires_grad_(False)


def of_tower(model: nn.Module, tokenizer, draw: random.Random) -> Callable[[], Tensor]:
    """Return the loss of naming what lies at each place of a picture: shape, colour and place, by embeddings."""
    groups = (("no", *pictures.SHAPES), ("no", *pictures.COLOURS), pictures.PLACES)
    embeddings = model.get_input_embeddings().weight.detach()
    known = [embeddings[[tokenizer.encode(f" {word}")[-1] for word in words]] for words in groups]
    known = [nn.functional.normalize(some, dim=1) for some in known]  # (words, D) of each group

    def loss() -> Tensor:
        images, labels = [], []  # labels: B x P of three words
        while len(images) < TRAINING["tower"]["pictures"]:
            things = pictures.scene(draw)
            if not pictures.in_test(pictures.key_of(things)):
                images.append(pictures.drawn(things, draw.getrandbits(32)))
                labels += pictures.labels(things)
        places = torch.cat(tuple(model.get_image_features(pixels_of(np.stack(images))).pooler_output))  # (B P, D)
        wanted = [
            torch.tensor(list(map(words.index, some)))
            for words, some in zip(groups, zip(*labels, strict=True), strict=True)
        ]
        return sum(nn.functional.cross_entropy(places @ some.T, ids) for some, ids in zip(known, wanted, strict=True))

    return loss


def of_answers(model: nn.Module, tokenizer, draw: random.Random) -> Callable[[], Tensor]:
    """Return the loss of the next token in the answers."""

    def loss() -> Tensor:
        asked = [draw.choice(picture_rows.rows(draw, test=False)) for _ in range(TRAINING["language"]["questions"])]
        inputs, labels = batch(asked, tokenizer)
        states = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1]  # (B, T - 1, D)
        learnt = labels[:, 1:] >= 0
        return nn.functional.cross_entropy(model.lm_head(states[learnt]), labels[:, 1:][learnt])

    return loss


def prepare(folder: Path, language: str) -> None:
    """Train a model and write it with its processor, unless that was done before."""
    if (folder / "config.json").exists():
        return
    source = common.open_source(language)
    tokenizer = source.tokenizer
    model = untrained(source.whole_model(), tokenizer.convert_tokens_to_ids(IMAGE))
    train(model, tokenizer)
    processor(tokenizer).save_pretrained(folder)
    model.save_pretrained(folder)
