"""The joint form of up and down projections (LatentLLM Sec. 4.3): its rounds, weights alpha, beta, gamma, and cost.

Every row fits the MLP of some blocks alone, on the dense model's hidden states; one of eight rows is held out.

    python benchmarks/joint_up_down.py
    python benchmarks/joint_up_down.py --blocks 0 1 2 3 4 5
"""

import os
import time
from pathlib import Path

import torch

import common
from rankfold import calibrate, load_calibration, make_method
from rankfold.linalg.joint_mlp import MLP, joint_mlp, mlp_error
from rankfold.methods.latentllm.layout import dense_projections
from rankfold.methods.latentllm.measures import mlp_of
from rankfold.methods.latentllm.mlp import HELD_OUT

ROUNDS = (0, 1, 2, 4)
WEIGHTS = ("alpha", "beta", "gamma")
FACTORS = (0.1, 10.0)  # one weight at a time, over the others
DEFINITIONS = {
    "held_out_errors": "RMS error of the MLP's output over its RMS on rows that were not fitted, block by block",
    "training_errors": "the same on the rows that were fitted",
    "cpu_seconds": "of one process, mean of the blocks",
    "local": "up and down each by itself: what the rounds start from",
}


def main() -> None:
    parser = common.arguments(__doc__, "joint_up_down_opt-6m")
    parser.add_argument("--model", default=str(Path(os.environ.get("RANKFOLD_MODELS", ".")) / "opt-6m"))
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--sparsity", type=float, default=0.3)
    parser.add_argument("--weight-rounds", type=int, default=1, help="rounds of the rows with other weights")
    common.add_data(parser)
    args = parser.parse_args()
    source = common.open_source(args.model)
    path = common.data_file(args.data, "text/opt-6m-val.txt")
    tokens = load_calibration(str(path), source, num_samples=64, max_length=256)
    config = {
        "model": common.describe_model(source),
        "calibration": common.describe_tokens(tokens.ids, path.name, tokens.seed),
        "sparsity": args.sparsity,
        "blocks": args.blocks,
    }
    record = common.Record(args.json, config, DEFINITIONS, resume=True)
    problems = blocks(source, tokens, args)
    for name, options in settings(args.weight_rounds).items():
        if name not in record:
            found = [fitted(*problem, **options) for problem in problems]
            facts = {f"{key}s": [one[key] for one in found] for key in ("held_out_error", "training_error")}
            record.add(name, **options, **facts, cpu_seconds=sum(one["cpu_seconds"] for one in found) / len(found))
            common.say(f"{name}: {facts['held_out_errors']}")
    common.say(f"wrote {common.shown(str(args.json))}")


def settings(rounds: int) -> dict[str, dict]:
    """Return name -> options of a row."""
    found: dict[str, dict] = {"local": {"rounds": 0, "refit": False}}
    found |= {f"rounds {n}": {"rounds": n} for n in ROUNDS}
    for i, name in enumerate(WEIGHTS):
        for factor in FACTORS:
            weights = tuple(factor if j == i else 1.0 for j in range(3))
            found[f"{name} x {factor:g}, rounds {rounds}"] = {"rounds": rounds, "weights": weights}
    return found


def blocks(source, tokens, args) -> list[tuple[MLP, torch.Tensor, tuple[int, int]]]:
    """Return the MLP of each block, its inputs (D, n) and the ranks that the sparsity leaves it."""
    method = make_method("latentllm", sparsity=args.sparsity)
    moments, found = calibrate(source, tokens, statistics={"mlp_samples"}), []
    for index in args.blocks:
        view = source.block(index)
        dense = dense_projections(method, view)
        options = {option.module: option for option in method.prunable_modules(view)}
        ranks = tuple(
            max(
                r
                for r, n in zip(option.ranks, option.sizes, strict=True)
                if n <= (1 - args.sparsity) * option.sizes[-1]
            )
            for option in (options["up"], options["down"])
        )
        mlp = mlp_of(dense["up"], dense["down"])
        found.append(
            (
                mlp._replace(W_up=mlp.W_up.double(), W_down=mlp.W_down.double()),
                moments[index]["mlp_samples"].rows.T,
                ranks,
            )
        )
    return found


def fitted(mlp: MLP, X: torch.Tensor, ranks: tuple[int, int], **options) -> dict[str, float]:
    """Return the errors and the seconds of one fit."""
    known = X.shape[1] - X.shape[1] // HELD_OUT
    start = time.process_time()
    fit = joint_mlp(mlp, X[:, :known], ranks=ranks, ridge=1e-4, **options)
    seconds = time.process_time() - start
    small = MLP(fit.B_up @ fit.A_up, fit.b_up, fit.B_down @ fit.A_down, fit.b_down)
    return {
        "held_out_error": mlp_error(mlp, small, X[:, known:]),
        "training_error": fit.relative_error,
        "cpu_seconds": seconds,
    }


if __name__ == "__main__":
    main()
