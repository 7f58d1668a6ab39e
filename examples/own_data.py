"""Compress for one job: calibrate on rows of your own, and compare both models on held-out rows.

Needs: a .jsonl file with a column of text (chats in a column "messages" work in `calibration=` as they are).

    python examples/own_data.py MODEL ROWS.jsonl OUT --column text
"""

import argparse
import json
from pathlib import Path

import rankfold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id, folder or .gguf file")
    parser.add_argument("rows", type=Path, help="a .jsonl file")
    parser.add_argument("output", help="the folder to write")
    parser.add_argument("--column", default="text")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--num-samples", type=int, default=32, help="samples of the rows")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of each")
    args = parser.parse_args()

    texts = [json.loads(line)[args.column] for line in args.rows.read_text(encoding="utf-8").splitlines()]
    unseen, seen = texts[::10], [text for number, text in enumerate(texts) if number % 10]

    dense = rankfold.open_model(args.model, device="cpu")
    sizes = {"num_samples": args.num_samples, "max_length": args.max_length}
    small = rankfold.compress(dense, args.sparsity, calibration=seen, output=args.output, **sizes)
    print(small)

    windows = rankfold.load_calibration(unseen, dense, **sizes)
    for name, model in {"dense": dense, "compressed": small}.items():
        print(f"perplexity of unseen rows, {name}: {rankfold.perplexity(model, windows)['perplexity']:.2f}")


if __name__ == "__main__":
    main()
