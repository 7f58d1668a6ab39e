"""A small model of LLaVA's architecture that learns benchmarks/pictures.py, for benchmarks/images_and_text.py.

A CLIP vision tower and a projector of two layers, which first learn words for what lies where; then with them a Llama.
Its processor and tokenizer (one word, one token) are what transformers has for LLaVA, so that it is used as any other
such model.

Shape legend: B conversations or pictures, H x W pixels.
"""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers as t
from torch import Tensor, nn

import common
import pictures

SPECIAL = ("<unk>", "<pad>", "</s>", "<image>")
VOCABULARY = {word: i for i, word in enumerate((*SPECIAL, *pictures.WORDS))}
PAD, END, IMAGE = (VOCABULARY[word] for word in SPECIAL[1:])
PATCH = 12
PLACES = (pictures.SIZE // PATCH) ** 2  # tokens of a picture
MEAN, DEVIATION = 0.25, 0.25  # of pixels in [0, 1]
SEES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2},
    **{"image_size": pictures.SIZE, "patch_size": PATCH, "projection_dim": 32},
}
READS = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "vocab_size": len(VOCABULARY), "max_position_embeddings": 256},
    **{
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": END,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    },
}
TRAINING = {"scenes": 20_000, "tower_steps": 500, "steps": 4000, "pictures": 32, "texts": 16, "rate": 3e-3, "seed": 0}
# Turns follow each other; the place of a picture is before the first question.
TEMPLATE = (
    "{% for turn in messages %}{% if turn['role'] == 'user' %}{% for part in turn['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% else %} {{ turn['content'][0]['text'] }} </s> {% endif %}{% endfor %}"
)


def processor() -> t.LlavaProcessor:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>", "padding_side": "left"}
    text = t.PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens={"image_token": "<image>"}, **names)
    side = {"height": pictures.SIZE, "width": pictures.SIZE}
    images = t.CLIPImageProcessorPil(
        do_resize=False, crop_size=side, image_mean=[MEAN] * 3, image_std=[DEVIATION] * 3, do_center_crop=False
    )
    options = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return t.LlavaProcessor(images, text, chat_template=TEMPLATE, **options)


def untrained() -> t.LlavaForConditionalGeneration:
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**SEES),
        text_config=t.LlamaConfig(**READS),
        image_token_id=IMAGE,
        image_seq_length=PLACES,
        vision_feature_layer=-1,  # all blocks of the tower are used
        tie_word_embeddings=False,
    )
    torch.manual_seed(TRAINING["seed"])
    return t.LlavaForConditionalGeneration(config)


def pixels_of(images: np.ndarray) -> Tensor:
    """``(B, 3, H, W)`` as the processor makes them of ``(B, H, W, 3)`` uint8."""
    return ((torch.from_numpy(images).float() / 255 - MEAN) / DEVIATION).permute(0, 3, 1, 2)


def ids_of(questions: list[pictures.Question], before: str | None) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation, as the template makes them, and which are to be learnt.

    Args:
        before: a text before the first question; ``None``: a picture.
    """
    ids, learnt = ([IMAGE] * PLACES, [False] * PLACES) if before is None else ([], [])
    for number, question in enumerate(questions):
        text = f"{before} {question.text}" if before and not number else question.text
        asked = [VOCABULARY[word] for word in text.split()]
        ids += [*asked, VOCABULARY[question.answer], END]
        learnt += [False] * len(asked) + [True, True]
    return ids, learnt


class Conversations:
    """Training scenes with questions, in memory."""

    def __init__(self, scenes: int, seed: int):
        draw, images = random.Random(seed), []
        self.seen, self.read, labels = [], [], []  # conversations about pictures, and about texts
        while len(images) < scenes:
            things = pictures.scene(draw)
            text = pictures.described(things)
            if not pictures.in_test(text) and (asked := pictures.text_questions(things, draw)):
                self.read.append(ids_of(asked, text))
            if not pictures.in_test(pictures.key_of(things)):
                self.seen.append(ids_of(pictures.questions(things, draw), None))
                images.append(pictures.drawn(things, draw.getrandbits(32)))
                labels.append([[VOCABULARY[word] for word in words] for words in pictures.labels(things)])
        self.images, self.labels = np.stack(images), torch.tensor(labels)  # (B, H, W, 3), (B, cells, 3)

    def batch(self, pictures_: int, texts: int, generator: torch.Generator):
        """Two batches: inputs by name, and labels."""
        some = torch.randint(len(self.seen), (pictures_,), generator=generator).tolist()
        others = torch.randint(len(self.read), (texts,), generator=generator).tolist()
        seen = padded([self.seen[i] for i in some])
        return [
            (seen[0] | {"pixel_values": pixels_of(self.images[some])}, seen[1]),
            padded([self.read[i] for i in others]),
        ]


def padded(rows: list[tuple[list[int], list[bool]]]) -> tuple[dict[str, Tensor], Tensor]:
    """After the text, where causal attention does not see it; -100 where nothing is to be learnt."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([[*ids, *[PAD] * (longest - len(ids))] for ids, _ in rows])
    learnt = torch.tensor([[*mask, *[False] * (longest - len(mask))] for _, mask in rows])
    return {"input_ids": ids}, ids.masked_fill(~learnt, -100)


def learn(
    parameters: list[nn.Parameter],
    steps: int,
    losses: Callable[[], list[Tensor]],
    *,
    rate: float = TRAINING["rate"],
    decay: float = 0.05,
    warm_up: float = 0.05,
    every: int = 100,
) -> None:
    """So many steps on the sum of the losses that each call gives, which are shown at every so many."""
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=warm_up)
    for step in range(steps):
        found = losses()
        sum(found).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % every == 0:
            common.say(f"step {step}: loss {', '.join(f'{loss.item():.3f}' for loss in found)}")


def train() -> nn.Module:
    """The tower and the projector on the words for what lies where, as CLIP learns from captions; then everything."""
    data = Conversations(TRAINING["scenes"], TRAINING["seed"])
    common.say(f"{len(data.seen)} pictures, {len(data.read)} texts")
    generator, model = torch.Generator().manual_seed(TRAINING["seed"]), untrained().train()
    sees = [*model.model.vision_tower.parameters(), *model.model.multi_modal_projector.parameters()]

    def of_tower() -> list[Tensor]:
        some = torch.randint(len(data.images), (64,), generator=generator)
        patches = model.get_image_features(pixels_of(data.images[some.numpy()])).pooler_output
        logits = torch.cat(tuple(patches)) @ model.get_input_embeddings().weight.T  # (B x patches, words)
        return [nn.functional.cross_entropy(logits, words) for words in data.labels[some].flatten(0, 1).unbind(1)]

    def of_all() -> list[Tensor]:
        found = []
        for inputs, labels in data.batch(TRAINING["pictures"], TRAINING["texts"], generator):
            logits = model(**inputs, use_cache=False).logits[:, :-1]
            found.append(nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))
        return found

    learn([*sees, *model.get_input_embeddings().parameters()], TRAINING["tower_steps"], of_tower)
    learn(list(model.parameters()), TRAINING["steps"], of_all)
    return model.eval()


def prepare(folder: Path) -> None:
    """Train a model and write it with its processor, unless that was done before."""
    if (folder / "config.json").exists():
        return
    model = train()
    processor().save_pretrained(folder)
    model.save_pretrained(folder)
