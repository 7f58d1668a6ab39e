"""Pages of perplexity: by setting and sparsity, by text, by seed, and the studies of single choices."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from .curves import Curves, lowest, picture
from .curves import by_sparsity as by_sparsity_of
from .tables import by_sparsity, compressed, crossed, dense_of, number, score, setting, table, texts, windows

FORMS = "modegpt, the paper's module forms, uniform ranks, our ridge"
DEFAULT = "rankfold"


def perplexity(record: dict) -> list[str]:
    rows, dense = compressed(record), dense_of(record)
    told = [f"- dense: {number(dense['perplexity'])}"] if dense else []
    sized = any("bytes" in row for row in record["rows"])
    sizes = by_sparsity(rows, lambda row: f"{row['bytes'] / 1e6:.2f}" if "bytes" in row else "") if sized else []
    return [
        *texts(record),
        *told,
        "",
        *by_sparsity(rows, score),
        *(["", "MB of weights:", "", *sizes] if sized else []),
    ]


def options(record: dict) -> list[str]:
    """Return options beside the default, by text, and the bytes each leaves."""
    config, dense = record["config"], dense_of(record)
    names = list(config["evaluation"])
    body = [
        [
            setting(row),
            *((number(row["perplexity"][name]) for name in names) if "error" not in row else [row["error"], ""]),
            f"{row['bytes'] / 1e6:.2f}" if "bytes" in row else "",
        ]
        for row in (dense, *compressed(record))
    ]
    what = f"Sparsity {config['sparsity']}; perplexity by text."
    return [*texts(record), "", what, "", *table(["", *names, "MB of weights"], body)]


def domains(record: dict) -> list[str]:
    config = record["config"]
    text, names = config["calibration"], list(config["evaluation"])
    rows = [[row["name"], *(number(row["perplexity"][name]) for name in names)] for row in record["rows"]]
    what = f"Sparsity {config['sparsity']}, calibrated on {windows(text)} of `{text['source']}`."
    return [what, "", *table(["", *names], rows)]


def calibration(record: dict) -> list[str]:
    """Return perplexity by calibration and method."""
    config = record["config"]
    names = list(config["evaluation"])
    body = [
        [row.get("calibration", ""), setting(row), *(f"{row['perplexity'][name]:.2f}" for name in names)]
        for row in record["rows"]
    ]
    what = f"Sparsity {config['sparsity']}, calibrated on {windows(config['calibration'])}."
    return [what, "", *table(["calibrated on", "", *names], body)]


def probe_texts(record: dict) -> list[str]:
    """Return a row for every kind of text: dense perplexity, and the ratio after each calibration."""
    config, (dense, *rows) = record["config"], record["rows"]
    what = (
        f"{config['model']['name']}, `{config['method']}` at sparsity {config['sparsity']}, calibrated on "
        f"{windows(config['calibration'])}. Perplexity of the compressed over that of the dense model."
    )
    body = [["held-out calibration windows", "", *(f"× {row['held_out']['ratio']:.2f}" for row in rows)]]
    for kind, facts in rows[0]["probe_texts"]["kinds"].items():
        ratios = [_probed(row["probe_texts"]["kinds"][kind]) for row in rows]
        body.append([f"probe texts: {kind}", f"{facts['perplexity_dense']:.2f}", *ratios])
    for name, before in dense["perplexity"].items():
        ratios = [f"× {row['perplexity'][name] / before:.2f}" for row in rows]
        body.append([f"whole text: {name}", f"{before:.2f}", *ratios])
    head = ["text", "dense", *(f"calibrated on {row['name']}" for row in rows)]
    return [what, "", *table(head, body, tight=True)]


def _probed(facts: dict) -> str:
    ratio = f"× {facts['ratio']:.2f} ± {facts['ratio'] * facts['standard_error']:.2f}"
    return f"**{ratio}**" if facts["is_damaged"] else ratio


def grid(record: dict, folder: Path | None = None) -> list[str]:
    """Return one table and picture a text: methods by sparsity; then the parameters that remain."""
    rows, dense = [row for row in compressed(record) if "error" not in row], dense_of(record)

    def name(row: dict) -> str:
        return f"{row['setting']} ({row['mode']})" + (", zeros stay" if row.get("zeros") else "")

    lines = [*texts(record), ""]
    for text, value in dense["perplexity"].items():
        found = by_sparsity(
            rows,
            lambda row: score(row | {"perplexity": row["perplexity"][text]}),  # noqa: B023
            name=name,
        )
        lines += [f"Perplexity on `{text}`; dense {number(value)}:", "", *found, ""]
        curves = by_sparsity_of(rows, value=lambda row: row["perplexity"][text])  # noqa: B023
        lines += _picture(folder, record, f"grid-{Path(text).stem}", f"Perplexity on {text}", lowest(curves), value)
    sizes = by_sparsity(rows, lambda row: f"{row['parameters'] / 1e6:.2f}", name=name)
    lines += [f"Million parameters stored; dense {dense['parameters'] / 1e6:.2f}:", "", *sizes, ""]
    failed = [f"- {row['name']} could not be done: {row['error']}" for row in record["rows"] if "error" in row]
    return [*lines, *failed, ""]


STUDIES = {
    "windows": "Calibration windows (MoDeGPT Fig. 5)",
    "epsilon": "Temperature of the influence allocation (Table 25); in brackets the sparsity of the block that loses "
    "most",
    "sparsity": "Sparsity (Table 32)",
    "alone": "One module alone, by a share of its own weights (Table 29)",
    "shares": "Other shares of the modules (Table 31)",
}


TITLES = {"sparsity": "Sparsity (MoDeGPT, Table 32)", "alone": "One module alone (MoDeGPT, Figure 4)"}


def studies(record: dict, folder: Path | None = None) -> list[str]:
    """Return one table a study: settings by what varies; and pictures of calibration windows and of single modules."""
    rows, dense = compressed(record), dense_of(record)["perplexity"]
    lines = [*texts(record), f"- dense: {number(dense)}", ""]
    for study in dict.fromkeys(row["study"] for row in rows):
        mine = [row for row in rows if row["study"] == study]
        more = {"epsilon": lambda row: f" ({row['largest']:.0%})"}.get(study, lambda row: "")
        cells = {(row["setting"], row["value"]): number(row["perplexity"]) + more(row) for row in mine}
        if study == "alone":
            cells |= {(setting, "slope"): f"{slope:.3f}" for setting, slope in _slopes(mine, dense).items()}
        lines += [f"### {STUDIES[study]}", "", *crossed(cells), ""]
        if study in TITLES:  # of single modules MoDeGPT's alone: all are too many to be told apart
            shown = [row for row in mine if study != "alone" or row["setting"].startswith("modegpt")]
            curves = by_sparsity_of(shown, at=lambda row: float(row["value"].rstrip("%")) / 100)
            lines += _picture(folder, record, f"study-{study}", TITLES[study], curves, dense)
        if study == "windows":
            file, title = f"{_stem(record)}-study-windows.png", "Calibration windows (MoDeGPT, Figure 5)"
            lines += picture(folder, file, title, _by_windows(mine), x="windows", y="perplexity")
    return lines


def _by_windows(rows: list[dict]) -> Curves:
    """Return setting -> windows with perplexity."""
    found: Curves = {}
    for row in sorted(rows, key=lambda row: row["windows"]):
        found.setdefault(row["setting"], []).append((row["windows"], row["perplexity"]))
    return found


def _picture(folder: Path | None, record: dict, name: str, title: str, curves: Curves, dense: float) -> list[str]:
    """Return the line of a picture of perplexity against sparsity."""
    labels = {"x": "sparsity (%)", "y": "perplexity"}
    return picture(folder, f"{_stem(record)}-{name}.png", title, curves, dense=dense, **labels)


def _stem(record: dict) -> str:
    return Path(record["config"]["model"]["name"]).stem


def _slopes(rows: list[dict], dense: float) -> dict[str, float]:
    """Return setting -> normalised slope; of settings with a row that knows the module's share."""
    shares, curves = {}, {}
    for row in rows:
        curves.setdefault(row["setting"], {0.0: dense})[float(row["value"].rstrip("%"))] = row["perplexity"]
        shares |= {row["setting"]: row["share"]} if "share" in row else {}
    return {
        name: statistics.linear_regression([*curves[name]], [*curves[name].values()]).slope / shares[name]
        for name in shares
    }


TABLE_2 = "The pre-conditioners, junctions and joint forms of LatentLLM (its Table 2)"
# The paper's order of LatentLLM's Table 2, worst first; within a step any of them.
ORDER = (("identity",), ("hessian", "l2"), ("rootcov",), ("rootcov + block identity",), ("latentllm (joint)",))
VO = ("rootcov + joint vo", "rootcov + joint vo, attention aware")


def latent(records: list[dict], folder: Path | None = None) -> list[str]:
    commands = [line for record in records for line in record["commands"]]
    lines = ["Made by", "", "```bash", *commands, "python benchmarks/render.py", "```", ""]
    lines += ["Perplexity, lower is better. The first six rows store plain factors.", ""]
    return lines + [line for record in records for line in _latent(record, folder)]


def _latent(record: dict, folder: Path | None) -> list[str]:
    rows, dense = compressed(record), dense_of(record)
    value = {(row["setting"], row["sparsity"]): row.get("perplexity") for row in rows}
    sparsities, measured = sorted({s for _, s in value}), {name for name, _ in value}
    lines = [f"## {record['config']['model']['name']}", "", *texts(record)]
    lines += [f"- dense: {number(dense['perplexity'])}", ""] if dense else [""]
    order = ("identity", "hessian", "l1", "l2", "covariance")
    rows.sort(key=lambda row: order.index(row["setting"]) if row["setting"] in order else len(order))
    lines += by_sparsity(rows, lambda row: number(row.get("perplexity")), tight=True)
    if dense:
        title, curves = "Pre-conditioners (LatentLLM, Figure 4)", by_sparsity_of(rows)
        lines += ["", *_picture(folder, record, "latent", title, curves, dense["perplexity"])]
    lines += ["", "The paper's orders, worse first, in these numbers (ratios of perplexities):", ""]
    for worse, better in pairwise(ORDER):
        lines += [verdict(a, b, value, sparsities) for a in worse for b in better]
    if set(VO) <= measured:
        lines += [
            "",
            "Values and outputs together, against apart (Remark 11: no gain; `joint=auto` leaves them apart):",
            "",
        ]
        lines += [verdict(name, "rootcov + block identity", value, sparsities) for name in VO]
    return [*lines, ""]


def verdict(worse: str, better: str, value: dict, sparsities: list[float]) -> str:
    """Return in words whether one setting is better than another, and by how much."""
    have = [s for s in sparsities if value.get((worse, s)) and value.get((better, s))]
    if not have:
        return f"- {worse} against {better}: not measured."
    ratio = {s: value[worse, s] / value[better, s] for s in have}
    yes, no = [s for s in have if ratio[s] >= 1], [s for s in have if ratio[s] < 1]
    times = {s: f"{r:.3f}" if r < 10 else f"{r:,.0f}" for s, r in ratio.items()}
    size = "the first over the second: " + ", ".join(f"{times[s]} at {s:.0%}" for s in have)
    where = ", ".join(f"{s:.0%}" for s in (yes if yes else no))
    said = "**holds** at every sparsity" if not no else "**does not hold** at any sparsity"
    return f"- {worse} ≥ {better}: {said if not (yes and no) else f'**holds in part**, at {where}'} ({size})."


def ablations(records: list[dict]) -> list[str]:
    """Return the default without each of its steps, of models with a record on one text and one across texts."""
    across = {r["config"]["model"]["fingerprint"]: r for r in records if r["benchmark"] == "domains"}
    lines = []
    for record in records:
        other = across.get(record["config"]["model"]["fingerprint"])
        if record["benchmark"] == "perplexity" and other:
            lines += [*_ablations(record, other), ""]
    return lines


def _ablations(record: dict, across: dict) -> list[str]:
    """Return settings by sparsity on one text, then by text at the sparsity of the other record."""
    found = {(row["setting"], row["sparsity"]): row["perplexity"] for row in compressed(record)}
    others = {row["name"]: row["perplexity"] for row in across["rows"]}
    at, names = across["config"]["sparsity"], list(across["config"]["evaluation"])
    settings = [name for name in dict.fromkeys(name for name, _ in found) if name.partition(" ")[0] == DEFAULT]
    settings.sort(key=lambda name: (name != DEFAULT, -found.get((name, at), 0.0)))
    sparsities = sorted({s for name, s in found if name in settings and name != DEFAULT})
    body = [
        [
            name,
            *(number(found[name, s]) if (name, s) in found else "" for s in sparsities),
            *(number(others[name][text]) if name in others else "" for text in names),
        ]
        for name in (*settings, FORMS)
        if any(key[0] == name for key in found)
    ]
    one, other = (config["calibration"]["source"] for config in (record["config"], across["config"]))
    head = ["", *(f"{one}, {s:.0%}" for s in sparsities), *(f"{other} → {text}, {at:.0%}" for text in names)]
    lines = [
        f"## {record['config']['model']['name']}",
        "",
        "```bash",
        *record["commands"],
        *across["commands"],
        "```",
        "",
    ]
    return [*lines, f"Perplexity; calibrated on {one} or on {other}.", "", *table(head, body)]


def seeds(records: list[dict]) -> list[str]:
    """Return mean and deviation over the records that differ in their calibration seed alone."""
    groups = defaultdict(list)
    for record in records:
        config = record["config"]
        drawn = {key: value for key, value in config["calibration"].items() if key not in ("seed", "sha256")}
        groups[repr(config | {"calibration": drawn})].append(record)
    return [line for group in groups.values() if len(group) > 1 for line in (*_seeds(group), "")]


def _cells(record: dict) -> Iterator[tuple[str, str, float]]:
    """Yield setting, column and perplexity: columns are sparsities, or the texts of `domains`."""
    for row in compressed(record):
        if isinstance(row["perplexity"], dict):
            at = record["config"]["sparsity"]
            yield from ((row["name"], f"{text}, {at:.0%}", value) for text, value in row["perplexity"].items())
        else:
            yield row["setting"], f"{row['sparsity']:.0%}", row["perplexity"]


def _seeds(records: list[dict]) -> list[str]:
    found = defaultdict(list)
    for record in records:
        for name, column, value in _cells(record):
            found[name, column].append(value)

    def cell(values: list[float]) -> str:
        few = f" ({len(values)} seeds)" if len(values) < len(records) else ""
        return f"{number(statistics.mean(values))} ± {statistics.stdev(values):.2f}{few}"

    config = records[0]["config"]
    drawn = ", ".join(str(record["config"]["calibration"]["seed"]) for record in records)
    about, *evaluated = texts(records[0])
    return [
        f"## {config['model']['name']}",
        "",
        "```bash",
        *(command for record in records for command in record["commands"]),
        "```",
        "",
        f"{about}, drawn with the seeds {drawn}",
        *(evaluated if "source" in config["evaluation"] else []),
        "- mean ± standard deviation over the seeds",
        "",
        *crossed({key: cell(values) for key, values in found.items() if len(values) > 1}),
    ]
