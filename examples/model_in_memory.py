"""Compress a model that is in memory, one that you have just trained for example, and use the result at once.

Needs: a model and its tokenizer in a folder or on the hub, a text file.

    python examples/model_in_memory.py MODEL TEXT OUT
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import rankfold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or folder")
    parser.add_argument("text", type=Path, help="a .txt file to calibrate on")
    parser.add_argument("output", help="the folder to write")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--num-samples", type=int, default=32, help="samples of the text")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of each")
    parser.add_argument("--prompt", default="The capital of France is")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    paragraphs = args.text.read_text(encoding="utf-8").split("\n\n")

    result = rankfold.compress(  # does not change `model`
        model,
        args.sparsity,
        calibration=paragraphs,  # or a datasets.Dataset, token ids, a DataLoader
        tokenizer=tokenizer,
        num_samples=args.num_samples,
        max_length=args.max_length,
    )
    ids = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    for name, network in {"dense": model, "compressed": result.model}.items():
        written = network.generate(**ids, max_new_tokens=32, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        print(f"{name}, {network.num_parameters():,} parameters: {tokenizer.decode(written[0])}")

    result.save_pretrained(args.output)
    AutoModelForCausalLM.from_pretrained(args.output)  # an ordinary checkpoint


if __name__ == "__main__":
    main()
