"""The answers that pages of results begin with, in a sentence each. Every number is the records'."""

import math

from .costs import CLOSE, is_close
from .perplexity import FORMS
from .random_matrices import STUDIES, verdict
from .tables import named, number, percent, windows

SMOL, OPT, STORIES = "SmolLM2", "opt-6m", "stories260K"
PARTS = (("mlp", "MLP"), ("qk", "queries and keys"), ("vo", "values and outputs"))
Rows = dict[str, dict]


def of_model(records: list[dict], model: str, **config: object) -> Rows:
    """Return name -> row of the first record of a model."""
    return named(
        next(
            r
            for r in records
            if model in r["config"].get("model", {}).get("name", "")
            and all(r["config"].get(key) == value for key, value in config.items())
        )
    )


def first(row: dict) -> str:
    """Return the perplexity on the first text."""
    found = row["perplexity"]
    return number(next(iter(found.values())) if isinstance(found, dict) else found)


def perplexity(records: list[dict]) -> str:
    found = of_model(records, SMOL)
    dense, default, modegpt, latent = (
        first(found[name]) for name in ("dense", "rankfold 0.3", "modegpt 0.3", "latentllm (joint) 0.3")
    )
    return (
        f"At 0.3 SmolLM2 goes from {dense} to {default} by the "
        f"default, {modegpt} by `modegpt` and {latent} by `latentllm`."
    )


def first_run(records: list[dict]) -> str:
    ((row,),) = (record["rows"] for record in records)
    kinds = [facts["ratio"] for facts in row["probe_texts"]["kinds"].values()]
    return (
        f"With {records[0]['config']['sparsity']:.0%} removed, {SMOL} has × {row['held_out']['ratio']:.2f} of its "
        f"perplexity on held-out calibration samples, and × {min(kinds):.2f} to {max(kinds):.2f} on six kinds of text."
    )


def grid(records: list[dict]) -> str:
    found = of_model(records, SMOL)
    best = sorted(
        (row for row in found.values() if row.get("sparsity") == 0.3 and "error" not in row), key=_first_value
    )
    named = [f"`{row['setting']}` ({first(row)})" for row in best[:3]]
    return f"On SmolLM2 at 0.3 (dense {first(found['dense'])}) least by {named[0]}, then {named[1]} and {named[2]}."


def _first_value(row: dict) -> float:
    return next(iter(row["perplexity"].values()))


def seeds(records: list[dict]) -> str:
    drawn = [named(r) for r in records if r["benchmark"] == "perplexity" and SMOL in r["config"]["model"]["name"]]
    ranges = []
    for setting in ("rankfold", "modegpt"):
        values = [found[f"{setting} 0.3"]["perplexity"] for found in drawn]
        ranges.append(f"{number(min(values))} to {number(max(values))}")
    return f"Over {len(drawn)} draws the default has {ranges[0]} at 0.3 on SmolLM2, `modegpt` {ranges[1]}."


def zero_shot(records: list[dict]) -> str:
    found = of_model(records, SMOL)
    dense, default, modegpt = (percent(found[name]["mean"]) for name in ("dense", "rankfold 0.3", "modegpt 0.3"))
    noise = percent(found["rankfold 0.3"]["mean_stderr"])
    return (
        f"SmolLM2's mean of four tasks is {dense}; at 0.3 {default} by the default, {modegpt} by `modegpt` (± {noise})."
    )


def domains(records: list[dict]) -> str:
    found = named(records[0])
    dense = found["dense"]["perplexity"]

    def ratios(name: str) -> str:
        return ", ".join(f"× {value / dense[text]:.2f}" for text, value in found[name]["perplexity"].items())

    return (
        f"Calibrated on C4, the default has {ratios('rankfold')} of the dense "
        f"perplexity on three texts, MoDeGPT's module forms {ratios(FORMS)}."
    )


def calibration(records: list[dict]) -> str:
    found = {row.get("calibration", ""): row["perplexity"] for row in records[0]["rows"] if row.get("setting") != FORMS}
    c4, wiki = list(found["c4"])[:2]
    mixed, alone = found["c4 + wikitext2"], (found["c4"][c4], found["wikitext2"][wiki])
    worst = max(mixed[c4] / alone[0], mixed[wiki] / alone[1]) - 1
    crossed = found["wikitext2"][c4] / alone[0] - 1
    return (
        f"A mixture of C4 and WikiText-2 is within {percent(worst)} of "
        f"each alone; WikiText-2 alone costs C4 {percent(crossed)}."
    )


def probe_texts(records: list[dict]) -> str:
    row = of_model(records, SMOL, method="rankfold")["wikitext2"]
    code = row["probe_texts"]["kinds"]["source code"]["ratio"]
    return (
        f"No: SmolLM2 calibrated on WikiText-2 alone has × {row['held_out']['ratio']:.2f} "
        f"of its perplexity there, and × {code:.0f} on source code."
    )


def recover(records: list[dict]) -> str:
    found = of_model(records, STORIES)
    dense, small, better = (
        first(found[name]) for name in ("dense", "sparsity: nothing, 30%", "tokens: all weights, 300 k")
    )
    rows = next(found for found in map(named, records) if "tokens: all weights, sparsity 0.3, 1 M" in found)
    names = ("sparsity: nothing, 30%", "tokens: all weights, sparsity 0.3, 1 M")
    whole = rows["dense"]["perplexity"]
    before, after = (
        " and ".join(f"× {rows[name]['perplexity'][text] / whole[text]:.2f}" for text in ("wikitext2 test", "c4"))
        for name in names
    )
    return (
        f"With 0.3 removed, SmolLM2 has {before} of the dense perplexity (WikiText-2, C4), and {after} after a million "
        f"tokens; stories260K goes from {small} to {better} in 300,000 tokens (dense {dense})."
    )


def tradeoff(records: list[dict]) -> str:
    found = of_model(records, SMOL)
    told = [
        f"`{name}` {first(found[f'{name} 0.4'])} at × {found[f'{name} 0.4']['speed']['prefill_ratio']:.2f}"
        for name in ("rankfold", "modegpt", "slicegpt", "shortgpt")
    ]
    return (
        f"With 0.4 of SmolLM2 removed, perplexity (dense {first(found['dense'])}) and prefill speed: {', '.join(told)}."
    )


def keep_quality(records: list[dict]) -> str:
    found = [row for record in records for row in record["rows"] if "error" not in row]
    held_out, other = (
        sum(row["kept"][text] >= row["asked"] for row in found) for text in ("held-out samples", "other text")
    )
    most = max(row["compressions"] for row in found)
    return (
        f"In {held_out} of {len(found)} searches on held-out samples of the calibration text, and in {other} on "
        f"another text; each took at most {most} compressions."
    )


def same_bytes(records: list[dict]) -> str:
    """Say down to which size a quantised dense file is as good on all texts as any compressed one."""
    dense, compressed = _by_cut(records[0])
    free = [row["bytes"] for row in compressed if not any(_is_beaten(row, one) for one in dense)]
    if not free:
        return f"On {SMOL} quantising alone is better at every size."
    last = min((row for row in dense if row["bytes"] > max(free)), key=lambda row: row["bytes"])
    return (
        f"On {SMOL} quantising alone is better down to {last['format']} ({last['bytes'] / 1e6:.0f} MB); below it, both."
    )


def rounding(records: list[dict]) -> str:
    rounded, smaller = _by_cut(records[0])
    pays = [row["name"] for row in smaller if any(_is_beaten(one, row) for one in rounded)]
    least = min(rounded, key=lambda row: row["bytes"])["name"]
    told = (
        f"better and smaller than rounding alone: {', '.join(pays)}" if pays else "rounding alone is the better choice"
    )
    return f"On opt-6m, down to the size of {least}, {told}."


def _by_cut(record: dict) -> tuple[list[dict], list[dict]]:
    """Return the files of the dense model, and those of compressed ones."""
    rows = record["rows"]
    return [row for row in rows if not row["sparsity"]], [row for row in rows if row["sparsity"]]


def _is_beaten(row: dict, by: dict) -> bool:
    """Tell whether the other file is as small and as good on all texts."""
    as_good = (by["perplexity"][text] <= value for text, value in row["perplexity"].items())
    return by["bytes"] <= row["bytes"] and all(as_good)


def lowrankarena(records: list[dict]) -> str:
    rows = [row for row in records[0]["rows"][1:] if row["status"] == "done"]
    kept = {row["sparsity"]: [] for row in rows}
    for row in rows:
        kept[row["sparsity"]].append(f"`{row['label']}` {row['protocol']['retention']:.3f}")
    told = (f"with {1 - sparsity:.0%} of the parameters {', '.join(found)}" for sparsity, found in kept.items())
    return f"Retention of {SMOL}'s quality: {'; '.join(told)}."


def gates(records: list[dict]) -> str:
    measured = [
        (f"{row['name']}, {name}", row.get("kept", {}).get(name) or 0.0, least)
        for r in records
        for row in r["rows"]
        for name, least in _least(row)
    ]
    short = [f"{what} {kept:.3f} (wanted {least})" for what, kept, least in measured if kept < least]
    missed = f" Not held: {'; '.join(short)}." if short else ""
    return f"{len(measured) - len(short)} of {len(measured)} gates hold.{missed}"


def _least(row: dict) -> list[tuple[str, float]]:
    return [(name, least) for name, least in row.get("least", {}).items() if least is not None]


def speed(records: list[dict]) -> str:
    ratios = {name: row["models"]["compressed"]["ratio"] for name, row in named(records[0]).items()}
    return f"At 0.3 SmolLM2's prefill is × {ratios['prefill 8x256 float32']:.2f} in fp32."


def module_speed(records: list[dict]) -> str:
    found = records[0]["rows"][0]["models"]
    told = [
        f"{what} × {found[key]['prefill']['ratio']:.2f} and × {found[key]['decode']['ratio']:.2f}"
        for key, what in (("mlp", "the MLP"), ("qk", "queries and keys"), ("vo", "values and outputs"))
    ]
    return f"With 0.3 of one kind removed, speed in prefill and in decode: {told[0]}, {told[1]}, {told[2]}."


def decode(records: list[dict]) -> str:
    found = {name: f"× {row['found']['compressed']['ratio']:.2f}" for name, row in named(records[0]).items()}
    smol, llama = "SmolLM2-135M", "Llama-3.2-1B, 4 of 16 blocks"
    told = [
        f"{found[f'{smol}, {dtype}, batch 1']} with one sequence and {found[f'{smol}, {dtype}, batch 8']} with eight, "
        f"blocks of Llama 3.2 1B {found[f'{llama}, {dtype}, batch 1']} and {found[f'{llama}, {dtype}, batch 8']}"
        for dtype in ("float32", "bfloat16")
    ]
    return f"At 0.3, in fp32, SmolLM2 has {told[0]}. In bf16 it has {told[1]}."


def kv_cache(records: list[dict]) -> str:
    found = of_model(records, OPT)
    dense = found["dense"]["kv_bytes_per_token"]
    told = [
        f"{percent(1 - found[f'{name} 0.3']['kv_bytes_per_token'] / dense)} by `{name}`"
        for name in ("rankfold", "modegpt", "latentllm")
    ]
    return f"At 0.3 opt-6m's loses {', '.join(told)}; where the cache is part of the budget it gets what was asked for."


def draft(records: list[dict]) -> str:
    ratios = [row["ratio"] for r in records for row in r["rows"] if row["name"].startswith("rankfold")]
    return f"Text is written {min(ratios):.2f} to {max(ratios):.2f} times as fast as without a draft."


def complexity(records: list[dict]) -> str:
    found = [row for row in records[0]["rows"] if row["name"] and row.get("kind") == "counted"]
    equal = sum(row["equal"] for row in found)
    return (
        "Operations do; the cache falls in steps of the ranks. "
        f"A counter and the plan agree on {equal} of {len(found)} models."
    )


def memory(records: list[dict]) -> str:
    planned = [row["planned"] for record in records for row in record["rows"]]
    widest = max(records, key=lambda record: record["config"]["width"])
    told = " and ".join(f"{row['peak_bytes'] / 2**30:.1f} GiB by `{row['name'].split()[0]}`" for row in widest["rows"])
    return (
        f"Blocks of width {widest['config']['width']:,}: {told}, the program among it; plans state {min(planned):.2f} "
        f"to {max(planned):.2f} times what is measured beside that."
    )


def plan_time(records: list[dict]) -> str:
    rows = [row for record in records for row in record["rows"]]
    close = sum(is_close(row["ratio"]) for row in rows)
    return (
        f"{close} of {len(rows)} estimates are within a factor of {CLOSE} of what the run takes "
        f"({min(row['ratio'] for row in rows):.2f} to {max(row['ratio'] for row in rows):.2f})."
    )


def processes(records: list[dict]) -> str:
    record = records[0]
    told = ", ".join(f"× {row['ratio']:.2f} by `{row['name']}`" for row in record["rows"])
    same = "the same bytes" if all(row["same"] for row in record["rows"]) else "not the same bytes"
    return f"{record['config']['processes']} processes of one thread each over one: {told}; {same}."


def compression_cost(records: list[dict]) -> str:
    """Of the first precision of every record."""
    names = {"default": "the default", "sequential": "`modegpt`", "one-pass": "`modegpt` in one pass"}
    told = []
    for record in records:
        row = record["rows"][0]
        ratios = {name: row["ratios"][kind]["ratio"] for kind, name in names.items() if kind in row["ratios"]}
        forwards = ", ".join(f"{name} {ratio:.1f}" for name, ratio in ratios.items())
        told.append(f"{windows(record['config']['tokens'])} ({row['name']}): {forwards}")
    return f"In forwards over the calibration samples: {'; '.join(told)}."


def decomposition_cost(records: list[dict]) -> str:
    seconds: dict[str, float] = {}
    for row in records[0]["rows"]:
        seconds[row["method"]] = seconds.get(row["method"], 0.0) + row.get("seconds", math.nan)
    return (
        f"On two CPU threads {seconds['modegpt']:.0f} s by `modegpt` and {seconds['latentllm']:.0f} s by `latentllm`."
    )


def large_models(records: list[dict]) -> str:
    row = named(records[0])["Llama 70B rankfold"]
    return (
        f"By estimate the default takes {row['peak_bytes']['1'] / 1e9:.0f} GB "
        f"and {row['minutes']['1']:.0f} minutes for Llama 70B on one H100."
    )


def cholesky(records: list[dict]) -> str:
    ratios = [row["ratio"] for row in records[0]["rows"]]
    return (
        f"It takes {min(ratios):.1f} to {max(ratios):.1f} times as long "
        "as that of a matrix 8 rows larger, so rankfold appends 8 rows."
    )


def images_and_text(records: list[dict]) -> str:
    found = named(records[0])
    dense, both, text = (
        percent(found[name]["mean"])
        for name in ("dense", "language: rankfold 0.5", "language, calibrated on text: rankfold 0.5")
    )
    other = [percent(found[f"{where}: modegpt 0.5"]["mean"]) for where in ("language", "language, calibrated on text")]
    return (
        f"For the default yes: with half of the language model of a toy LLaVA removed it answers {both} (dense "
        f"{dense}), and {text} if calibrated on text alone. For `modegpt` no: {other[0]} and {other[1]}."
    )


def science_qa(records: list[dict]) -> str:
    found = named(records[0])
    dense, other = (percent(found[name]["acc"]) for name in ("dense", "dense, pictures of other questions"))
    at = ("language", "vision", "language and vision")
    shares = [percent(found[f"{case}: rankfold 0.3"]["acc"]) for case in at]
    return (
        f"With 0.3 of the language model, of the vision tower or of both removed the default answers {shares[0]}, "
        f"{shares[1]} and {shares[2]} (dense {dense}; with other pictures {other})."
    )


def encoders(records: list[dict]) -> str:
    digits, sentences = of_model(records, "ViT"), of_model(records, "MiniLM")
    return (
        f"At 0.5 a toy ViT of digits has an accuracy of {digits['rankfold 0.5']['accuracy']:.3f} "
        f"(dense {digits['dense']['accuracy']:.3f}); embeddings of sentences "
        f"keep a cosine of {sentences['rankfold 0.3']['cosine']:.2f} to the dense ones at 0.3, and "
        f"{percent(sentences['rankfold 0.3']['neighbours'])} of their nearest neighbours."
    )


def experts(records: list[dict]) -> str:
    dense, *others = records[0]["rows"]
    few = min(row["windows"] for row in others)
    found = {(row["name"], row["windows"]): row["perplexity"] for row in others}
    own, none = found["filled 4", few], found["none", few]
    return (
        f"Own tokens filled up with others: {own:.3f} with {few} windows, "
        f"{none:.3f} by weights alone (dense {dense['perplexity']:.3f})."
    )


def fewer_experts(records: list[dict]) -> str:
    found = {(row["model"], row.get("calibrated"), row["setting"], row["sparsity"]): row for row in records[0]["rows"]}

    def told(setting: str) -> str:
        return f"{found['balanced', 'both', setting, 0.3]['perplexity']['source']:.3f}"

    dense, others = found["balanced", None, "dense", 0.0]["perplexity"]["source"], "rankfold, experts may go"
    other_text = (found["balanced", "source", name, 0.3]["perplexity"]["topics"] for name in (others, "rankfold"))
    return (
        f"Both, for text of the kinds calibrated on: at 0.3 a small Mixtral has {told(others)} on source code (dense "
        f"{dense:.3f}), {told('reap')} where experts go, {told('rankfold')} where they become narrower. Text of "
        "other kinds loses more: {:.3f} against {:.3f}.".format(*other_text)
    )


def qk_norm(records: list[dict]) -> str:
    found = named(records[0])
    told = {}
    for form in ("reduced", "dense"):
        names = [f"rankfold, queries and keys {form}, {at}" for at in ("30%", "50%")]
        told[form] = " and ".join(number(found[name]["perplexity"]) for name in names)
    return (
        f"Seldom: a tiny Qwen 3 has {told['reduced']} at 0.3 and 0.5 with them compressed, and {told['dense']} without."
    )


def engines(records: list[dict]) -> str:
    found = named(records[0])
    llama, vllm = found["llama.cpp q8_0 rankfold for llama.cpp"], found["vllm bfloat16 rankfold for vllm"]
    return (
        f"Yes: at 0.3 SmolLM2's decoding is × {llama['decode ratio']:.2f} in llama.cpp (q8_0), "
        f"and its throughput × {vllm['throughput ratio']:.2f} in vLLM."
    )


def integrations(records: list[dict]) -> str:
    tested = [row["program"] for row in records[0]["rows"] if "tests" in row]
    return f"{', '.join(tested[:-1])} and {tested[-1]} do; each row has what it reached and changed."


def targets(records: list[dict]) -> str:
    found = of_model(records, SMOL)
    dense, *others = (
        first(found[name])
        for name in ("dense", *(f"rankfold for {t} 0.3" for t in ("transformers", "vllm", "llama.cpp")))
    )
    return (
        f"SmolLM2 at 0.3 (dense {dense}) has {others[0]} for transformers, "
        f"{others[1]} for vLLM and {others[2]} for llama.cpp."
    )


def ablations(records: list[dict]) -> str:
    found = of_model([r for r in records if r["benchmark"] == "perplexity"], SMOL)
    every, ranks, correction = (
        first(found[f"rankfold{option} 0.3"]) for option in ("", " allocation=uniform", " residual_correction=false")
    )
    return f"SmolLM2 at 0.3 has {every}; {ranks} with uniform ranks, {correction} without residual correction."


def studies(records: list[dict]) -> str:
    found = of_model(records, OPT)
    few, all_windows = (first(found[f"windows: modegpt, {n}"]) for n in ("8", "all 35"))
    return (
        f"For one, `modegpt` on opt-6m has {few} with 8 calibration windows "
        f"and {all_windows} with 35 (dense {first(found['dense'])})."
    )


def allocation(records: list[dict]) -> str:
    names = {"uniform": "uniform"} | {f"Eq. {n}, largest 0.8": f"by Eq. {n}" for n in (11, 43)} | {"OWL": "by OWL"}

    def told(model: str) -> str:
        found = of_model(records, model)
        values = [f"{first(found[f'allocation: {key}'])} {name}" for key, name in names.items()]
        return f"{', '.join(values)} (dense {first(found['dense'])})"

    return f"With MoDeGPT's own modules at 0.3, on opt-6m: {told(OPT)}; on SmolLM2: {told(SMOL)}."


def module_cost(records: list[dict]) -> str:
    found = of_model(records, OPT)
    told = [f"{what} {found[f'rankfold: {key}']['held_out_error']:.3f}" for key, what in PARTS]
    return f"With 0.3 of each removed from opt-6m by the default, the held-out errors are: {', '.join(told)}."


def latent_table(records: list[dict]) -> str:
    found = of_model(records, OPT)
    order = ("identity", "covariance", "rootcov", "latentllm (joint)")
    told = ", ".join(f"{name} {first(found[f'{name} 0.3'])}" for name in order)
    return f"Yes on opt-6m (at 0.3 {told}; dense {first(found['dense'])}), in part on SmolLM2."


def latentllm_options(records: list[dict]) -> str:
    dense, *others = of_model(records, OPT).values()
    done = [row for row in others if "error" not in row]
    best, worst = min(done, key=_first_value), max(done, key=_first_value)
    return (
        f"On opt-6m (dense {first(dense)}) from {first(best)} by `{best['name'].removeprefix('latentllm ')}` "
        f"to {first(worst)} by `{worst['name'].removeprefix('latentllm ')}`."
    )


def joint_up_down(records: list[dict]) -> str:
    found = named(records[0])
    local, joint = found["local"], found["rounds 4"]
    gains = [percent(1 - b / a) for a, b in zip(local["held_out_errors"], joint["held_out_errors"], strict=True)]
    seconds = f"{joint['cpu_seconds']:.0f} s of CPU a block against {local['cpu_seconds']:.0f} s"
    return (
        "Hardly: four rounds lower the held-out errors of two "
        f"blocks of opt-6m by {' and '.join(gains)}, for {seconds}."
    )


def junction_speed(records: list[dict]) -> str:
    found = {
        name: f"× {row['prefill']['ratio']:.2f}"
        for name, row in records[0]["rows"][0]["models"].items()
        if name != "dense"
    }
    return f"In prefill {', '.join(f'{name} {ratio}' for name, ratio in found.items())}."


def moment_precision(records: list[dict]) -> str:
    worst = sorted(row["errors"]["shipped"] for row in records[0]["rows"])
    count = sum(error < 0.1 for error in worst)
    return (
        f"{records[0]['config']['fp32_rows']['shipped']:,}: the error "
        f"is below 0.1 in {count} of {len(worst)} blocks of SmolLM2."
    )


def random_matrices(records: list[dict]) -> str:
    by_figure: dict[int, list[dict]] = {}
    for row in records[0]["rows"]:
        by_figure.setdefault(row["figure"], []).append(row)
    told = [verdict(STUDIES[n], mine) for n, mine in by_figure.items()]
    in_part = sum(text.startswith("Holds in") for text in told)
    return f"{len(told) - in_part} of {len(told)} hold, {in_part} in part."


def mutants(records: list[dict]) -> str:
    tried = sum(row["tried"] for row in records[0]["rows"])
    alive = sum(len(row["survived"]) for row in records[0]["rows"])
    return f"{alive} of {tried} that were tried; the survivors are below."
