"""Write docs/results, and the table, example and picture of the README, out of the records and nothing else.

python benchmarks/render.py
"""

import argparse
from functools import partial
from pathlib import Path

from pages import (
    allocation,
    costs,
    gates,
    gpu,
    keep_quality,
    lowrankarena,
    models,
    perplexity,
    random_matrices,
    readme,
    recovery,
    rounding,
    same_bytes,
)
from pages.summaries import summary
from rankfold._utils.files import read_json, write_text
from rankfold._utils.sizes import plural

HERE = Path(__file__).resolve().parent
RESULTS, DOCS, README = HERE / "results", HERE.parent / "docs" / "results", HERE.parent / "README.md"
# Page -> records, title, lines of one record.
PAGES = {
    "first_run": ("first_run", "The first run of the README", readme.first_run),
    "gates": ("gates_*", "What every method must keep", gates.gates),
    "keep_quality": ("keep_quality_*", "Keeping a quality", keep_quality.keep_quality),
    "lowrankarena": ("lowrankarena_*", "By the rules of LowRankArena", lowrankarena.lowrankarena),
    "zero_shot": ("zero_shot*", "Zero-shot accuracy", models.zero_shot),
    "domains": ("domains*", "Across texts", perplexity.domains),
    "calibration": ("calibration_*", "What the calibration text does across texts", perplexity.calibration),
    "probe_texts": ("probe_texts_*", "Kinds of text that the calibration does not show", perplexity.probe_texts),
    "encoders": ("encoders_*", "Encoders", models.encoders),
    "images_and_text": ("images_and_text*", "Images and text, by kind of question", models.images_and_text),
    "science_qa": ("science_qa*", "A model that sees, by column of ScienceQA", models.science_qa),
    "perplexity": ("perplexity_*", "Perplexity", perplexity.perplexity),
    "grid": ("grid_*", "Every method on the same texts", perplexity.grid),
    "allocation": ("allocation_*", "Sparsity by block", allocation.allocation),
    "studies": ("studies_*", "Single choices, as the papers study them", perplexity.studies),
    "latentllm_options": ("latentllm_options_*", "Options of LatentLLM", perplexity.options),
    "random_matrices": (
        "random_matrices*",
        "Studies on random matrices (LatentLLM, Figures 7 to 16)",
        random_matrices.random_matrices,
    ),
    "joint_up_down": ("joint_up_down_*", "The joint form of up and down projections", costs.joint_up_down),
    "module_cost": ("module_cost_*", "What each kind of module holds, takes and loses", costs.module_cost),
    "module_speed": ("module_speed_*", "Speed by module", costs.module_speed),
    "junction_speed": ("junction_speed_*", "Speed of latents, by junction", costs.junction_speed),
    "tradeoff": ("tradeoff_*", "Perplexity against speed", models.tradeoff),
    "samples": ("samples_*", "What compressed models write", models.samples),
    "integrations": ("integrations*", "Other programs on compressed models", costs.integrations),
    "engines": ("engines*", "Speed in other engines", costs.engines),
    "recover": ("recover_*", "What a few minutes of training give back", recovery.recover),
    "same_bytes": ("same_bytes*", "Compressed, quantised, or both, at the same bytes", same_bytes.same_bytes),
    "rounding": ("rounding_*", "Compressed, rounded to few bits, or both", rounding.rounding),
    "draft": ("draft*", "As a draft of the dense model", costs.draft),
    "targets": ("targets_*", "What a target costs", models.targets),
    "compression_cost": ("compression_cost*", "What compressing costs, in forwards", costs.compression_cost),
    "plan_time": ("plan_time*", "The time of every method, and what the plan says of it", costs.plan_time),
    "processes": ("processes*", "Several processes", costs.processes),
    "qk_norm": ("qk_norm*", "Fewer dimensions of normalised queries and keys", models.qk_norm),
    "moment_precision": ("moment_precision*", "Precision of the moments", costs.moment_precision),
    "cholesky": ("cholesky*", "Cholesky and memory pages", costs.cholesky),
    "speed": ("speed*", "Speed, dense against compressed", costs.speed),
    "decode": ("decode*", "Decoding one token at a time", costs.decode),
    "memory": ("memory*", "Peak memory of compressing a streamed model", costs.memory),
    "kv_cache": ("kv_cache_*", "The key/value cache", models.kv_cache),
    "complexity": ("complexity*", "Parameters, MACs and cache against sparsity", costs.complexity),
    "mutants": ("mutants*", "Mutants that the tests notice", costs.mutants),
    "experts": ("experts*", "What experts are fitted to", models.experts),
    "fewer_experts": ("fewer_experts*", "Fewer experts, narrower ones, or both", models.fewer_experts),
    "large_models": ("large_models*", "Memory and time of large models, computed", costs.large_models),
    "gpu": ("gpu*", "On an accelerator", gpu.gpu),
    "decomposition_cost": ("decomposition_cost*", "Decomposing one block", costs.decomposition_cost),
}
# Pages with pictures.
DRAWN = (
    *("tradeoff", "random_matrices", "same_bytes", "recover", "allocation", "grid", "studies"),
    *("latent_table", "images_and_text", "science_qa"),
)
# Page -> patterns of records, title, lines of all of them together.
TOGETHER = {
    "ablations": (("domains", "perplexity_*"), "The default without each of its steps", perplexity.ablations),
    "seeds": (("domains*", "perplexity_*"), "Perplexity over calibration seeds", perplexity.seeds),
    "latent_table": (
        ("latent_*",),
        "The pre-conditioners, junctions and joint forms of LatentLLM (its Table 2)",
        perplexity.latent,
    ),
}
FOOT = ["Written by `python benchmarks/render.py`.", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="records to read")
    parser.add_argument(
        "--docs", type=Path, default=DOCS, metavar="DIR", help="folder to write; the README too if left out"
    )
    args = parser.parse_args()
    args.docs.mkdir(parents=True, exist_ok=True)
    for name, text in pages(args.results, pictures=args.docs).items():
        write_text(args.docs / f"{name}.md", text)
    if args.docs == DOCS:
        readme.render(args.results, README, DOCS / "index.md")


def pages(results: Path, pictures: Path | None = None) -> dict[str, str]:
    """Return page -> text, of the records that are there.

    Args:
        pictures: folder that pictures are written to; none are without.
    """
    found = {}
    for name, (pattern, title, lines_of) in PAGES.items():
        records = [record for path, record in records_of(results, pattern) if "_seed" not in path.name]
        lines_of = partial(lines_of, folder=pictures) if name in DRAWN else lines_of
        lines = [line for r in records for line in (*heading(r), *lines_of(r), "", *definitions(r))]
        found |= {name: "\n".join([f"# {title}", "", *summary(name, records), *lines, *FOOT])} if records else {}
    for name, (patterns, title, lines_of) in TOGETHER.items():
        paths = [item for pattern in patterns for item in records_of(results, pattern)]
        records = [record for path, record in paths if name == "seeds" or "_seed" not in path.name]
        lines_of = partial(lines_of, folder=pictures) if name in DRAWN else lines_of
        foot = [] if name == "latent_table" else FOOT
        text = [f"# {title}", "", *summary(name, records), *lines_of(records), *foot] if records else []
        found |= {name: "\n".join(text)} if records else {}
    return found


def records_of(results: Path, pattern: str) -> list[tuple[Path, dict]]:
    return [(path, read_json(path)) for path in sorted(results.glob(f"{pattern}.json"))]


def heading(record: dict) -> list[str]:
    model = record["config"].get("model")
    hardware, packages = record["hardware"], record["versions"]
    lines = [f"## {model['name']}", ""] if model else []
    lines += ["```bash", *record["commands"], "```", ""]
    every = [row.get("versions", packages) for row in record["rows"]] or [packages]
    found = {package: dict.fromkeys(one[package] for one in every if package in one) for package in packages}
    versions = ", ".join(f"{package} {' and '.join(of_rows)}" for package, of_rows in found.items())
    cpus = " and ".join(dict.fromkeys(row.get("cpu", hardware["cpu"]) for row in record["rows"]))
    threads = dict.fromkeys(row.get("threads", hardware["threads"]) for row in record["rows"]) or [hardware["threads"]]
    return [*lines, f"{cpus}, {' and '.join(plural(count, 'thread') for count in threads)}; {versions}.", ""]


def definitions(record: dict) -> list[str]:
    return [f"- {name}: {text}" for name, text in record["definitions"].items()] + [""]


if __name__ == "__main__":
    main()
