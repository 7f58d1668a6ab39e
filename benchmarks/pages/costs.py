"""Pages of what compressing costs, of how fast results are, and of what other programs and the tests make of them."""

import statistics
import tomllib
from pathlib import Path

from .tables import crossed, table, windows

GIB, MIB = 2**30, 2**20
REASONS = Path(__file__).resolve().parents[2] / "scripts" / "survivors.toml"


def compression_cost(record: dict) -> list[str]:
    rows = []
    for row in record["rows"]:
        for kind, ratio in row["ratios"].items():
            low, high = ratio["range"]
            seconds = [f"{row[f'{what}_seconds']:.1f}" for what in ("forward", kind)]
            target = f"{ratio['target']} {'met' if ratio['met'] else '**missed**'}" if "met" in ratio else ""
            rows.append([row["name"], kind, *seconds, f"{ratio['ratio']:.2f} [{low:.2f}, {high:.2f}]", target])
    method, tokens = record["config"]["method"], record["config"]["tokens"]
    what = f"`{method['method']}`, sparsity {method['sparsity']}, {windows(tokens)}."
    return [what, "", *table(["precision", "mode", "forward, s", "compression, s", "ratio", "target"], rows)]


def moment_precision(record: dict) -> list[str]:
    settings, found = record["config"]["fp32_rows"], record["rows"]
    rows = [
        [f"`{r['name']}`", f"{r['largest']:,.0f}", f"{r['smallest_eigenvalue']:,.1f}"]
        + [f"{r['errors'][name]:.3f}" for name in settings]
        for r in found
    ]
    medians = [f"{statistics.median(r['errors'][name] for r in found):.3f}" for name in settings]
    head = [
        "block",
        "largest activation",
        "smallest eigenvalue",
        *(f"{name}: {n:,} rows" for name, n in settings.items()),
    ]
    return table(head, [*rows, ["median", "", "", *medians]])


def cholesky(record: dict) -> list[str]:
    rows = [
        [r["name"], f"{r['seconds'] * 1e3:.1f}", f"{r['padded_seconds'] * 1e3:.1f}", f"{r['ratio']:.2f}"]
        for r in record["rows"]
    ]
    return table(["N", "ms", "ms, a few rows larger", "ratio"], rows)


def speed(record: dict) -> list[str]:
    rows = []
    for row in record["rows"]:
        dense, small = row["models"]["dense"], row["models"]["compressed"]
        low, high = small["range"]
        speeds = [f"{dense['tokens_per_second']:,.0f}", f"{small['tokens_per_second']:,.0f} [{low:,.0f}, {high:,.0f}]"]
        rows.append([row["kind"], f"{row['batch']} x {row['length']}", row["dtype"], *speeds, f"{small['ratio']:.2f}"])
    config = record["config"]
    method = config.get("method", {})
    what = f"`{method['method']}`, sparsity {method['sparsity']}" if method else f"`{config['compressed']}`"
    head = ["", "batch x tokens", "dtype", "dense, tokens/s", "compressed, tokens/s", "ratio"]
    return [f"{what}, {config['repeats']} rounds.", "", *table(head, rows)]


def settled(found: dict) -> str:
    """Return speed, ratio, its quartiles, and whether they lie on one side of 1."""
    speed = f"{found['tokens_per_second']:,.0f}"
    if "ratio" not in found:
        return f"{speed} × 1"
    low, high = found["quartiles"]
    note = "" if low > 1 or high < 1 else ", no difference measured"
    return f"{speed} × {found['ratio']:.2f} [{low:.2f}, {high:.2f}]{note}"


ABOUT = "rounds. Tokens per second, over the dense model's, and the quartiles of that."


def _rounds(record: dict) -> str:
    """Return from the fewest to the most that a row took."""
    rounds = sorted({row["rounds"] for row in record["rows"]})
    return f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else str(rounds[0])


def module_speed(record: dict) -> list[str]:
    """Return modules by sparsity, for every precision, prefill and decode."""
    config, rows = record["config"], record["rows"]
    how = config["speed"]
    what = f"`{config['method']}`; {how['batch']} x {how['prompt']} tokens of prefill, then {how['steps']} steps"
    lines = [f"{what}; {_rounds(record)} {ABOUT}", ""]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for kind in ("prefill", "decode"):
            mine = [(row, *item) for row in rows if row["dtype"] == dtype for item in row["models"].items()]
            cells = {(name, f"{row['sparsity']:.0%}"): settled(found[kind]) for row, name, found in mine}
            lines += [f"### {kind}, {dtype}", "", *crossed(cells), ""]
    return lines


def junction_speed(record: dict) -> list[str]:
    """Return models by prefill and decode, for every precision and batch."""
    lines = [f"`latentllm`, sparsity {record['config']['sparsity']}; {_rounds(record)} {ABOUT}", ""]
    for row in record["rows"]:
        shape = f"{row['batch']} x {row['prompt']} tokens of prefill, {row['batch']} x {row['steps']} of decode"
        cells = {
            (name, kind): settled(found[kind])
            for name, found in row["models"].items()
            for kind in ("prefill", "decode")
        }
        lines += [f"### {row['dtype']}, {shape}", "", *crossed(cells), ""]
    return lines


def decode(record: dict) -> list[str]:
    """Return shapes by what was measured."""
    kinds = ("dense", "compressed", "matrix products, compressed")
    rows = [
        [row["shape"], row["dtype"], str(row["batch"]), *(settled(row["found"][kind]) for kind in kinds)]
        for row in record["rows"]
    ]
    how = record["config"]
    under = "torch.compile, a static cache" if how["compile"] else "eager, the cache that grows"
    head = ["", "dtype", "batch", "dense", "compressed", "matrix products alone"]
    what = f"{how['rounds']} rounds after {how['prompt']} tokens; {under}."
    return [what, "", *table(head, rows, tight=True)]


def memory(record: dict) -> list[str]:
    names = ("peak", "baseline", "stream", "shard", "block", "moments", "model")
    rows = [
        [row["name"], *(f"{row[f'{name}_bytes'] / MIB:,.0f}" for name in names), f"{row['ratio']:.2f}"]
        + ["met" if row["met"] else "**missed**", f"{row['planned']:.2f}"]
        for row in record["rows"]
    ]
    c = record["config"]
    what = f"Random Llama, {c['blocks']} blocks, d = {c['width']}, F = {c['hidden']}; {windows(c)}."
    head = ["MiB", *names, "ratio", "target 3", "planned / measured"]
    return [what, "", *table(head, rows)]


CLOSE = 1.5  # factor within which an estimate of time is wanted


def is_close(ratio: float) -> bool:
    return 1 / CLOSE <= ratio <= CLOSE


def plan_time(record: dict) -> list[str]:
    """Return methods by what their run took, and what the plan had said of it."""
    c, rows = record["config"], record["rows"]
    shapes = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        width, hidden, heads, key_heads, blocks = c["shapes"][shape]
        sizes = f"width {width:,}, {hidden:,} hidden units, {heads} heads, {key_heads} of keys, {blocks} blocks"
        shapes.append(f"- {shape}: {sizes}")
    cells = {
        (f"`{row['method']}`", row["shape"]): f"{row['needed']['total']:.1f} ({row['ratio']:.2f})"
        for row in sorted(rows, key=lambda row: row["method"])
    }
    what = "Random Llamas; seconds of a compression, and in brackets the plan's estimate over them."
    text = f"{c['samples']} x {c['length']} random tokens, {c['threads']} threads."
    return [f"{what} {text}", "", *shapes, "", *crossed(cells, head="method")]


def processes(record: dict) -> list[str]:
    """Return methods by number of processes."""
    c, rows = record["config"], record["rows"]
    body = [
        [
            f"`{row['name']}`",
            *(f"{row['seconds'][n]:.1f}" for n in row["seconds"]),
            f"{row['ratio']:.2f} [{row['range'][0]:.2f}, {row['range'][1]:.2f}]",
            "the same" if row["same"] else "**different**",
        ]
        for row in rows
    ]
    what = f"Sparsity {c['sparsity']}; {windows(c['tokens'])}, {c['shards']} shards; one thread a process."
    head = ["method", "1 process, s", f"{c['processes']} processes, s", "times faster", "result"]
    return [what, "", *table(head, body)]


def complexity(record: dict) -> list[str]:
    rows, tokens = record["rows"], record["config"]["tokens"]
    counted = [r for r in rows if r.get("kind") == "counted"]
    agree = f"{sum(r['equal'] for r in counted)} of {len(counted)} compressed models of a few blocks"
    lines = [f"Counter, formula and plan agree exactly on {agree}.", ""]
    head = ["sparsity", f"GFLOPs, {tokens} tokens", f"GMACs, {tokens} tokens", "M parameters", "KV bytes per token"]

    def cells(r: dict) -> list[str]:
        if "error" in r:
            return [r["error"], "", "", ""]
        operations = [f"{r[f'{kind}_per_token'] * tokens / 1e9:,.2f}" for kind in ("flops", "macs")]
        return [*operations, f"{r['parameters'] / 1e6:,.2f}", f"{r['kv_bytes_per_token']:,}"]

    for model, method in dict.fromkeys((r["model"], r["method"]) for r in rows):
        mine = [r for r in rows if (r["model"], r["method"]) == (model, method)]
        body = [[f"{r['sparsity']:.0%}", *cells(r)] for r in mine]
        lines += [f"### {model}, `{method}`, {mine[0].get('kind', 'planned')}", "", *table(head, body), ""]
    return lines


def joint_up_down(record: dict) -> list[str]:
    config = record["config"]
    blocks, errors = config["blocks"], ("held_out_errors", "training_errors")
    head = [
        "",
        *(f"block {b}, {key.split('_')[0]} rows" for key in ("held-out_", "fitted_") for b in blocks),
        "CPU s a block",
    ]
    rows = [
        [r["name"], *(f"{error:.4f}" for key in errors for error in r[key]), f"{r['cpu_seconds']:.1f}"]
        for r in record["rows"]
    ]
    what = f"Sparsity {config['sparsity']}; {windows(config['calibration'])} of `{config['calibration']['source']}`."
    return [what, "", *table(head, rows)]


GROUPS = {"modegpt": 3, "latentllm": 6}  # groups of modules of a block


def decomposition_cost(record: dict) -> list[str]:
    found, rows = record["rows"], []
    for r in found:
        facts = [r.get("error", ""), "", "", ""]
        if "error" not in r:
            ranks = ", ".join(f"{m} {rank}" for m, rank in r["ranks"].items())
            facts = [
                ranks,
                f"{r['seconds']:.1f}",
                *(f"{r[f'{what}_bytes'] / GIB:.2f}" for what in ("peak", "resident")),
            ]
        rows.append([f"`{r['method']}`", " + ".join(r["modules"]), *facts])
    for method in dict.fromkeys(r["method"] for r in found):
        mine = [r for r in found if r["method"] == method and "error" not in r]
        if len(mine) == GROUPS[method]:
            most = max(r["peak_bytes"] + r["resident_bytes"] for r in mine) / GIB
            seconds = sum(r["seconds"] for r in mine)
            rows.append([f"`{method}`", "whole block", "", f"{seconds:.1f}", "", f"{most:.2f} with the peak"])
    c = record["config"]
    what = f"One block, d = {c['width']}, F = {c['hidden']}, {c['heads']} heads, sparsity {c['sparsity']}."
    return [what, "", *table(["method", "module", "rank", "seconds", "peak, GiB", "resident before, GiB"], rows)]


def large_models(record: dict) -> list[str]:
    """Return models by method: sizes, and memory and time by number of accelerators."""
    c, rows = record["config"], record["rows"]
    counts = list(next(row["peak_bytes"] for row in rows if row["peak_bytes"]))

    def cells(row: dict) -> list[str]:
        if "error" in row:
            return [row["error"]]
        sizes = [
            f"{row['parameters'] / 1e9:.1f} → {row['parameters_after'] / 1e9:.1f}",
            f"{row['bytes_after'] / 1e9:,.0f}",
        ]
        memory = (row["peak_bytes"][n] / 1e9 for n in counts)
        fits = [f"{gb:.0f}" if gb <= c["gigabytes"] else f"**{gb:.0f}**" for gb in memory]
        return [*sizes, *fits, *(f"{row['minutes'][n]:,.1f}" for n in counts)]

    rates = "measured" if c["rates_are_measured"] else "predicted"
    what = (
        f"**Computed, not measured**: sparsity {c['sparsity']}, {windows(c)}, {rates} rates of `{c['gpu']}` with "
        f"{c['gigabytes']:g} GB. Bold: more than one has."
    )
    head = ["", "", "billions of parameters", "checkpoint, GB"]
    head += [f"peak of each of {n}, GB" if n != "1" else "peak, GB" for n in counts]
    head += [f"min on {n}" for n in counts]
    return [what, "", *table(head, [[row["model"], f"`{row['method']}`", *cells(row)] for row in rows])]


def module_cost(record: dict) -> list[str]:
    """Return methods' modules by what they hold, take and lose."""
    config, rows = record["config"], record["rows"]
    text, size = config["calibration"], rows[0]["model_bytes"] / MIB
    what = f"Sparsity {config['sparsity']} of the weights of one kind of module, or of all; {windows(text)} of"
    head = ["", "", "share of weights", "removed", "decompositions, s", "their peak, MiB", "whole run, s"]
    head += ["its peak, MiB (of the model)", "error, calibration", "error, held out"]

    def cells(row: dict) -> list[str]:
        peak = row["compress_peak_bytes"]
        errors = [row.get(key) for key in ("relative_error", "held_out_error")]
        return [
            *(row["setting"], row["module"], f"{row['share']:.1%}", f"{row['removed']:.1%}"),
            *(f"{row['decompose_seconds']:.1f}", f"{row['decompose_peak_bytes'] / MIB:,.0f}"),
            *(f"{row['compress_seconds']:.1f}", f"{peak / MIB:,.0f} (+{peak / row['model_bytes']:.0%})"),
            *("" if error is None else f"{error:.4f}" for error in errors),
        ]

    return [f"{what} `{text['source']}`. The model is {size:,.0f} MiB.", "", *table(head, map(cells, rows))]


def integrations(record: dict) -> list[str]:
    def shown(value) -> str:
        if isinstance(value, list):
            return " to ".join(map(shown, value))
        return f"{value:.2g}" if isinstance(value, float) else str(value)

    def facts(row: dict) -> str:
        mine = {key: value for key, value in row.items() if key in record["definitions"] and key != "on"}
        return "; ".join(f"{key} {shown(value)}" for key, value in mine.items())

    tests = [[r["program"], r["version"], r["tests"]] for r in record["rows"] if "tests" in r]
    found = [[r["program"], r["on"], facts(r)] for r in record["rows"] if "on" in r]
    return [*table(["program", "version", "tests"], tests), "", *table(["program", "on", "what was measured"], found)]


def engines(record: dict) -> list[str]:
    speeds = ("prefill", "decode", "throughput")

    def shown(row: dict, what: str) -> str:
        if f"{what} ratio" not in row:
            return f"{row[what]:,.0f}" if what in row else ""
        low, high = row[f"{what} ratio quartiles"]
        return f"{row[what]:,.0f} (× {row[f'{what} ratio']:.2f}, {low:.2f}–{high:.2f})"

    names = ("engine", "version", "dtype", "model", "rounds")
    rows = [
        [*(str(r[name]) for name in names), f"{r['bytes'] / 1e6:.0f} MB", *(shown(r, s) for s in speeds)]
        for r in record["rows"]
    ]
    return table(["engine", "version", "weights", "model", "rounds", "size", *speeds], rows)


def draft(record: dict) -> list[str]:
    """Return a line on whether any draft pays, and a row for each."""
    config, rows = record["config"], record["rows"]
    llama = "llama_cpp" in config
    size, same = ("file", []) if llama else ("parameters", ["same"])

    def shown(row: dict) -> list[str]:
        low, high = row["ratio quartiles"]
        accepted = f"{row['accepted']:.0%}" if "accepted" in row else ""
        speed = [f"{row['tokens/s']:.1f}", f"{row['ratio']:.2f} ({low:.2f}–{high:.2f})"]
        sized = f"{row['bytes'] / 1e6:.0f} MB" if llama else f"{row['parameters'] / 1e6:.1f} M"
        found = [f"{row['same']} of {row['prompts']}"] if same else []
        return [row["name"], sized, accepted, f"{row['tokens per forward']:.2f}", *speed, *found]

    pays = [row["name"] for row in rows if row["ratio quartiles"][0] > 1]
    said = (
        f"Faster than no draft, by the lower quartile of rounds: {', '.join(pays)}."
        if pays
        else "It does not pay: no draft is faster than none."
    )
    calibration, prompts = config["calibration"], config["prompts"]
    asked = f"- {windows(prompts)} of `{prompts['source']}`, {config['tokens']} tokens written after each"
    return [
        f"- calibration: {windows(calibration)} of `{calibration['source']}`",
        f"{asked}; {config['rounds']} rounds",
        f"- in llama.cpp {config['llama_cpp']}, {config['threads']} threads" if llama else "- in transformers",
        "",
        said,
        "",
        *table(["draft", size, "accepted", "tokens per forward", "tokens/s", "ratio", *same], map(shown, rows)),
    ]


def mutants(record: dict) -> list[str]:
    """Return a line a file, then every survivor, with why it may stay where somebody looked into it."""
    rows = sorted(record["rows"], key=lambda row: row["name"])
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8"))
    why = {row["name"]: [_reason(row["name"], mutant, reasons) for mutant in row["survived"]] for row in rows}
    names = ("mutants", "tried", "killed")
    counts = [
        [*(row[name] for name in names), len(row["timed_out"]), len(row["survived"]), sum(map(bool, why[row["name"]]))]
        for row in rows
    ]

    def line(name: str, count: list[int]) -> list[str]:
        _, tried, killed, endless, *_ = count
        return [name, *map(str, count), f"{(killed + endless) / tried:.0%}"]

    body = [line(f"`{row['name']}`", count) for row, count in zip(rows, counts, strict=True)]
    body.append(line("all", [sum(column) for column in zip(*counts, strict=True)]))
    lines = table(["file", *names, "timed out", "survived", "explained", "score"], body)
    lines[1] = "| " + " | ".join(["---"] * 8) + " |"
    lines.append("")
    for row in rows:
        lines += [f"### {row['name']}", ""] if row["survived"] else []
        for mutant, text in zip(row["survived"], why[row["name"]], strict=True):
            lines.append(f"- `{mutant['function']}`: {_code(mutant['old'])} → {_code(mutant['new'])}")
            lines += [f"  {text}"] if text else []
        lines += [""] if row["survived"] else []
    return [*lines, "Reasons are those of `scripts/survivors.toml`."]


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _reason(file: str, mutant: dict, reasons: dict) -> str:
    """Return why a survivor may stay; empty where nobody said."""
    for entry in reasons.get(file, []):
        if all(entry[key] == mutant[key] for key in ("function", "old", "new")):
            return entry["why"]
    return ""
