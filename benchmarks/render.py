"""Tables in docs/results/ out of the records in benchmarks/results/. No number comes from anywhere else.

python benchmarks/render.py
"""

import argparse
import statistics
from pathlib import Path

import ablation_table
import calibration
import common
import decode
import encoders
import engines
import images_and_text_table
import integrations
import junction_speed
import kv_cache
import latent_table
import module_cost
import module_speed
import mutants_table
import probe_texts
import readme_table
import samples
import seeds_table
import studies_table
import targets
import tradeoff
import zero_shot_table
from decomposition_cost import GROUPS
from rankfold._utils.files import read_json, write_text

GIB, MIB = 2**30, 2**20
DOCS, README = common.DOCS, common.HERE.parent / "README.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=common.RESULTS, metavar="DIR", help="records to read")
    parser.add_argument(
        "--docs", type=Path, default=DOCS, metavar="DIR", help="folder to write; the README too where it is this one"
    )
    args = parser.parse_args()
    common.DOCS = args.docs
    args.docs.mkdir(parents=True, exist_ok=True)
    for name, (pattern, title, table) in PAGES.items():
        paths = [path for path in sorted(args.results.glob(pattern)) if "_seed" not in path.name]
        records = [read_json(path) for path in paths]
        if not records:
            common.say(f"{name}: no {pattern}")
            continue
        lines = [f"# {title}", ""]
        for record in records:
            lines += [*heading(record), *table(record), "", *definitions(record)]
        lines += ["Written by `python benchmarks/render.py`.", ""]
        write_text(args.docs / f"{name}.md", "\n".join(lines))
        common.say(f"wrote {name}.md: {len(records)} records")
    ablation_table.render(args.results)
    seeds_table.render(sorted([*args.results.glob("perplexity_*.json"), *args.results.glob("domains*.json")]))
    latent = sorted(args.results.glob("latent_*.json"))
    if latent:
        latent_table.render(latent)
    if args.docs == DOCS:
        readme_table.render(args.results, README)


def heading(record: dict) -> list[str]:
    model = record["config"].get("model")
    hardware, packages = record["hardware"], record["versions"]
    lines = [f"## {model['name']}", ""] if model else []
    lines += ["```bash", *record["commands"], "```", ""]
    versions = ", ".join(f"{package} {version}" for package, version in packages.items())
    cpus = " and ".join(dict.fromkeys(row.get("cpu", hardware["cpu"]) for row in record["rows"]))
    return [*lines, f"{cpus}, {hardware['threads']} threads; {versions}.", ""]


def definitions(record: dict) -> list[str]:
    return [f"- {name}: {text}" for name, text in record["definitions"].items()] + [""]


def grid(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def perplexity(record: dict) -> list[str]:
    config, rows = record["config"], record["rows"]
    found = {(r.get("setting", "dense"), r["sparsity"]): r for r in rows}
    sparsities = sorted({s for _, s in found} - {0.0})
    texts = [
        f"- {use}: {config[use]['samples']} x {config[use]['length']} tokens of `{config[use]['source']}`"
        for use in ("calibration", "evaluation")
    ]
    dense = [f"- dense: {latent_table.number(found['dense', 0.0]['perplexity'])}"] if ("dense", 0.0) in found else []
    names, head = list(dict.fromkeys(s for s, _ in found if s != "dense")), ["", *(f"{s:.0%}" for s in sparsities)]

    def table(cell) -> list[str]:
        return grid(head, [[name, *(cell(found.get((name, s), {})) for s in sparsities)] for name in names])

    sizes = ["", "MB of weights:", "", *table(megabytes)] if any("bytes" in row for row in rows) else []
    return [*texts, *dense, "", *table(score), *sizes]


def score(row: dict) -> str:
    return latent_table.number(row["perplexity"]) + mark(row) if row else ""


def megabytes(row: dict) -> str:
    return f"{row['bytes'] / 1e6:.2f}" if "bytes" in row else ""


def mark(row: dict) -> str:
    return " (!)" if row.get("damaged") else ""


def cost(record: dict) -> list[str]:
    rows = []
    for row in record["rows"]:
        for kind, ratio in row["ratios"].items():
            low, high = ratio["range"]
            rows.append(
                [
                    row["name"],
                    kind,
                    f"{row['forward_seconds']:.1f}",
                    f"{row[f'{kind}_seconds']:.1f}",
                    f"{ratio['ratio']:.2f} [{low:.2f}, {high:.2f}]",
                    _target(ratio) if "met" in ratio else "",
                ]
            )
    method, tokens = record["config"]["method"], record["config"]["tokens"]
    what = f"`{method['method']}`, sparsity {method['sparsity']}, {tokens['samples']} x {tokens['length']} tokens."
    return [what, "", *grid(["precision", "mode", "forward, s", "compression, s", "ratio", "target"], rows)]


def _target(ratio: dict) -> str:
    return f"{ratio['target'] or '(1 + 3) x one-pass'} {'met' if ratio['met'] else '**missed**'}"


def moment_precision(record: dict) -> list[str]:
    settings = record["config"]["fp32_rows"]
    rows = [
        [f"`{r['name']}`", f"{r['largest']:,.0f}", f"{r['smallest_eigenvalue']:,.1f}"]
        + [f"{r['errors'][name]:.3f}" for name in settings]
        for r in record["rows"]
    ]
    medians = [f"{statistics.median(r['errors'][name] for r in record['rows']):.3f}" for name in settings]
    head = [
        "block",
        "largest activation",
        "smallest eigenvalue",
        *(f"{name}: {n:,} rows" for name, n in settings.items()),
    ]
    return grid(head, [*rows, ["median", "", "", *medians]])


def cholesky(record: dict) -> list[str]:
    rows = [
        [r["name"], f"{r['seconds'] * 1e3:.1f}", f"{r['padded_seconds'] * 1e3:.1f}", f"{r['ratio']:.2f}"]
        for r in record["rows"]
    ]
    return grid(["N", "ms", "ms, a few rows larger", "ratio"], rows)


def speed(record: dict) -> list[str]:
    rows = []
    for row in record["rows"]:
        dense, small = row["models"]["dense"], row["models"]["compressed"]
        low, high = small["range"]
        rows.append(
            [
                row["kind"],
                f"{row['batch']} x {row['length']}",
                row["dtype"],
                f"{dense['tokens_per_second']:,.0f}",
                f"{small['tokens_per_second']:,.0f} [{low:,.0f}, {high:,.0f}]",
                f"{small['ratio']:.2f}",
            ]
        )
    config = record["config"]
    method = config.get("method", {})
    what = f"`{method['method']}`, sparsity {method['sparsity']}" if method else f"`{config['compressed']}`"
    head = ["", "batch x tokens", "dtype", "dense, tokens/s", "compressed, tokens/s", "ratio"]
    return [f"{what}, {config['repeats']} rounds.", "", *grid(head, rows)]


def memory(record: dict) -> list[str]:
    names = ("peak", "baseline", "stream", "shard", "block", "moments", "model")
    rows = [
        [
            r["name"],
            *(f"{r[f'{n}_bytes'] / MIB:,.0f}" for n in names),
            f"{r['ratio']:.2f}",
            "met" if r["met"] else "**missed**",
        ]
        for r in record["rows"]
    ]
    c = record["config"]
    what = f"Random Llama, {c['blocks']} blocks, d = {c['width']}, F = {c['hidden']}; {c['samples']} x {c['length']} tokens."
    return [what, "", *grid(["MiB", *names, "ratio", "target 3"], rows)]


def complexity(record: dict) -> list[str]:
    rows, tokens = record["rows"], record["config"]["tokens"]
    counted = [r for r in rows if r.get("kind") == "counted"]
    equal = sum(r["equal"] for r in counted)
    lines = [
        f"Counter, formula and plan agree exactly on {equal} of {len(counted)} compressed models of a few blocks.",
        "",
    ]
    for model, method in dict.fromkeys((r["model"], r["method"]) for r in rows):
        mine = [r for r in rows if (r["model"], r["method"]) == (model, method)]
        body = [
            [f"{r['sparsity']:.0%}", r["error"], "", "", ""]
            if "error" in r
            else [
                f"{r['sparsity']:.0%}",
                f"{r['flops_per_token'] * tokens / 1e9:,.2f}",
                f"{r['macs_per_token'] * tokens / 1e9:,.2f}",
                f"{r['parameters'] / 1e6:,.2f}",
                f"{r['kv_bytes_per_token']:,}",
            ]
            for r in mine
        ]
        head = ["sparsity", f"GFLOPs, {tokens} tokens", f"GMACs, {tokens} tokens", "M parameters", "KV bytes per token"]
        lines += [f"### {model}, `{method}`, {mine[0].get('kind', 'planned')}", "", *grid(head, body), ""]
    return lines


def decomposition(record: dict) -> list[str]:
    rows = []
    for r in record["rows"]:
        name = [f"`{r['method']}`", " + ".join(r["modules"])]
        if "error" in r:
            rows.append([*name, r["error"], "", "", ""])
            continue
        ranks = ", ".join(f"{m} {rank}" for m, rank in r["ranks"].items())
        peak = f"{r['peak_bytes'] / GIB:.2f}"
        rows.append([*name, ranks, f"{r['seconds']:.1f}", peak, f"{r['resident_bytes'] / GIB:.2f}"])
    for method in dict.fromkeys(r["method"] for r in record["rows"]):
        mine = [r for r in record["rows"] if r["method"] == method]
        if len(mine) == len(GROUPS[method]) and not any("error" in r for r in mine):
            most = max(r["peak_bytes"] + r["resident_bytes"] for r in mine) / GIB
            seconds = sum(r["seconds"] for r in mine)
            rows.append([f"`{method}`", "whole block", "", f"{seconds:.1f}", "", f"{most:.2f} with the peak"])
    c = record["config"]
    what = f"One block, d = {c['width']}, F = {c['hidden']}, {c['heads']} heads, sparsity {c['sparsity']}."
    return [what, "", *grid(["method", "module", "rank", "seconds", "peak, GiB", "resident before, GiB"], rows)]


# Page -> records, title, table of one record.
def domains(record: dict) -> list[str]:
    config = record["config"]
    text, names = config["calibration"], list(config["evaluation"])
    what = f"Sparsity {config['sparsity']}, calibrated on {text['samples']} x {text['length']} tokens of `{text['source']}`."
    rows = [[r["name"], *(latent_table.number(r["perplexity"][name]) for name in names)] for r in record["rows"]]
    return [what, "", *grid(["", *names], rows)]


def qk_norm(record: dict) -> list[str]:
    """Settings and forms against sparsity."""
    rows = {(r["setting"], r["form"], r["sparsity"]): r for r in record["rows"] if "form" in r}
    dense = next(r for r in record["rows"] if "form" not in r)
    sparsities = sorted({s for *_, s in rows})
    body = [
        [
            setting,
            form,
            *(
                latent_table.number(rows[setting, form, s]["perplexity"]) if (setting, form, s) in rows else ""
                for s in sparsities
            ),
        ]
        for setting, form in dict.fromkeys((setting, form) for setting, form, _ in rows)
    ]
    head = ["", "queries and keys; or what norms divide by", *(f"{s:.0%}" for s in sparsities)]
    return [f"Dense: {latent_table.number(dense['perplexity'])}.", "", *grid(head, body)]


def experts(record: dict) -> list[str]:
    dense, *rows = record["rows"]
    windows = list(dict.fromkeys(row["windows"] for row in rows))
    fewest = {row["windows"]: row["fewest"] for row in rows}
    found = {(row["name"], row["windows"]): row["perplexity"] for row in rows}
    head = ["fitted to", *(f"{n} windows, fewest tokens {fewest[n]:.0f}" for n in windows)]
    table = [[name, *(f"{found[name, n]:.3f}" for n in windows)] for name in dict.fromkeys(row["name"] for row in rows)]
    return [f"Perplexity; dense {dense['perplexity']:.3f}.", "", *grid(head, table)]


PAGES = {
    "zero_shot": ("zero_shot*.json", "Zero-shot accuracy", zero_shot_table.table),
    "domains": ("domains*.json", "Across texts", domains),
    "calibration": ("calibration_*.json", "What the calibration text does across texts", calibration.table),
    "probe_texts": ("probe_texts_*.json", "Kinds of text that the calibration does not show", probe_texts.table),
    "encoders": ("encoders_*.json", "Encoders", encoders.table),
    "images_and_text": ("images_and_text*.json", "Images and text, by kind of question", images_and_text_table.table),
    "perplexity": ("perplexity_*.json", "Perplexity", perplexity),
    "grid": ("grid_*.json", "Every method on the same texts", studies_table.grid),
    "studies": ("studies_*.json", "Single choices, as the papers study them", studies_table.studies),
    "module_cost": ("module_cost_*.json", "What each kind of module holds, takes and loses", module_cost.table),
    "module_speed": ("module_speed_*.json", "Speed by module", module_speed.table),
    "decode": ("decode*.json", "Decoding one token at a time", decode.table),
    "junction_speed": ("junction_speed_*.json", "Speed of latents, by junction", junction_speed.table),
    "tradeoff": ("tradeoff_*.json", "Perplexity against speed", tradeoff.table),
    "samples": ("samples_*.json", "What compressed models write", samples.table),
    "integrations": ("integrations*.json", "Other programs on compressed models", integrations.table),
    "engines": ("engines*.json", "Speed in other engines", engines.table),
    "targets": ("targets_*.json", "What a target costs", targets.table),
    "compression_cost": ("compression_cost*.json", "What compressing costs, in forwards", cost),
    "qk_norm": ("qk_norm*.json", "Fewer dimensions of normalised queries and keys", qk_norm),
    "moment_precision": ("moment_precision*.json", "Precision of the moments", moment_precision),
    "cholesky": ("cholesky*.json", "Cholesky and memory pages", cholesky),
    "speed": ("speed*.json", "Speed, dense against compressed", speed),
    "memory": ("memory*.json", "Peak memory of compressing a streamed model", memory),
    "kv_cache": ("kv_cache_*.json", "The key/value cache", kv_cache.table),
    "complexity": ("complexity*.json", "Parameters, MACs and cache against sparsity", complexity),
    "mutants": ("mutants*.json", "Mutants that the tests notice", mutants_table.table),
    "experts": ("experts*.json", "What experts are fitted to", experts),
    "decomposition_cost": ("decomposition_cost*.json", "Decomposing one block", decomposition),
}


if __name__ == "__main__":
    main()
