"""Compress, train for a few minutes to predict what the dense model predicts, and write one GGUF file for llama.cpp.

Needs: pip install 'rankfold[gguf]', a Llama-shaped model, a text file.

    python examples/recover_to_gguf.py MODEL TEXT OUT.gguf
    llama-cli -m OUT.gguf -p "Once upon a time"
"""

import argparse
from pathlib import Path

import rankfold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id, folder or .gguf file")
    parser.add_argument("text", help="a .txt file: to calibrate on, and to train on")
    parser.add_argument("output", type=Path, help="the .gguf file to write")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--num-samples", type=int, default=32, help="samples of the text")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of each")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens to train on")
    args = parser.parse_args()

    # The target chooses ranks that llama.cpp takes as they are, so that the file is as small as planned.
    small = rankfold.compress(
        args.model,
        args.sparsity,
        target="llama.cpp",
        calibration=args.text,
        num_samples=args.num_samples,
        max_length=args.max_length,
        device="cpu",
    )
    better = rankfold.recover(small, calibration=args.text, tokens=args.tokens, max_length=args.max_length)
    for name, found in better.record["recovery"]["held_out"].items():
        dense, before, after = (found[key] for key in ("perplexity_dense", "perplexity_before", "perplexity"))
        print(f"perplexity of {name}: dense {dense:.2f}, {before:.2f} -> {after:.2f}")
    done = rankfold.export(better.model, args.output, "gguf-deci", dtype="float16", tokenizer=small.dense.tokenizer)
    print(f"{args.output}: {done.exported:,} parameters; dense {done.dense:,}, compressed {done.compressed:,}")


if __name__ == "__main__":
    main()
