"""Compress, win back some of the loss with LoRA, and write one GGUF file for llama.cpp.

Needs: pip install peft 'rankfold[gguf]', a Llama-shaped model, a text file.

    python examples/lora_to_llama_cpp.py MODEL TEXT OUT.gguf
    llama-cli -m OUT.gguf -p "Once upon a time"
"""

import argparse
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

import rankfold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id, folder or .gguf file")
    parser.add_argument("text", help="a .txt file: to calibrate on, and to train on")
    parser.add_argument("output", type=Path, help="the .gguf file to write")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--num-samples", type=int, default=32, help="samples of the text")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of each")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args()

    # Compress. The target chooses ranks that llama.cpp takes as they are, so that the file is as small as planned.
    source = rankfold.open_model(args.model, dtype="float32", device="cpu")
    tokens = rankfold.load_calibration(args.text, source, num_samples=args.num_samples, max_length=args.max_length)
    model = rankfold.compress(source, args.sparsity, target="llama.cpp", calibration=tokens).model

    # LoRA on every linear layer of the compressed model.
    torch.manual_seed(0)
    tuned = get_peft_model(model, LoraConfig(target_modules="all-linear", r=8, lora_alpha=16, task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=args.lr)
    for step in range(args.steps):
        ids = tokens.ids[step % len(tokens.ids)][None]
        loss = tuned(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")

    # Merge, save, export. The file is read back and its logits compared before it gets its name.
    with tempfile.TemporaryDirectory() as place:
        folder = rankfold.save(tuned.merge_and_unload().eval(), Path(place, "small"), source.tokenizer)
        done = rankfold.export(folder, args.output, "gguf-deci", dtype="float16")
    print(f"{args.output}: {done.exported:,} parameters; dense {done.dense:,}, compressed {done.compressed:,}")


if __name__ == "__main__":
    main()
