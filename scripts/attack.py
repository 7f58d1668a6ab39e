"""Attack the command line with hostile arguments and damaged files, and count what held.

    python scripts/attack.py --cases 500                # of each kind; writes the record and docs/results/robustness.md
    python scripts/attack.py --kind moments --seed 17   # one case again; nothing is written

Every case is a kind and a seed. What must hold: exit code 0 or 2 (3 where training was undone, 1 where a comparison has
a row that could not be done), a refusal is one line and leaves nothing behind, no exception reaches the user. Damaged
moments never change a result; a damaged checkpoint that is used computes what it did, or is another one for everybody
who reads it; a text that is read is the one that was written.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "benchmarks" / "results" / "robustness.json", ROOT / "docs" / "results" / "robustness.md"
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # no case needs the network
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]


def main() -> None:
    logging.basicConfig(handlers=[logging.NullHandler()])  # warnings of every single case
    from attacks.arena import KINDS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="of each kind, seeds 0, 1, ...")
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    parser.add_argument("--seed", type=int, help="only this case")
    options = parser.parse_args()
    kinds = [options.kind] if options.kind else list(KINDS)
    seeds = range(options.cases) if options.seed is None else [options.seed]
    begin = time.perf_counter()
    found = run(kinds, seeds, verbose=options.seed is not None)
    if options.kind is None and options.seed is None:
        write(found, len(seeds), time.perf_counter() - begin)
    from attacks.arena import HELD

    sys.exit(any(outcome.verdict not in HELD for outcomes in found.values() for outcome in outcomes))


def run(kinds: list[str], seeds, verbose: bool) -> dict:
    """Kind -> outcomes; what did not hold is printed."""
    from attacks.arena import HELD, Arena

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(Path(folder) / "arena")
        for kind in kinds:
            found[kind] = []
            for seed in seeds:
                outcome = arena.attack(kind, seed)
                found[kind].append(outcome)
                if verbose or outcome.verdict not in HELD:
                    print(*outcome, sep="\n    ", flush=True)
            print(kind, dict(Counter(outcome.verdict for outcome in found[kind])), flush=True)
    return found


def write(found: dict, cases: int, seconds: float) -> None:
    """The record, and the page made of it."""
    from attacks.arena import HELD

    from rankfold._utils.files import write_json, write_text
    from rankfold.report.record import versions

    counts = {kind: dict(Counter(outcome.verdict for outcome in outcomes)) for kind, outcomes in found.items()}
    failed = [outcome._asdict() for outcomes in found.values() for outcome in outcomes if outcome.verdict not in HELD]
    record = {"cases": cases, "seconds": seconds, "versions": versions(), "counts": counts, "failed": failed}
    write_json(RECORD, record)
    write_text(PAGE, page(record))


def page(record: dict) -> str:
    """Markdown."""
    from attacks.arena import HELD, VERDICTS

    cases, counts = record["cases"], record["counts"]
    rows = [
        f"| {kind} | {sum(count.values()):,} | {' | '.join(f'{count.get(verdict, 0):,}' for verdict in VERDICTS)} |"
        for kind, count in counts.items()
    ]
    held = sum(count.get(verdict, 0) for count in counts.values() for verdict in HELD)
    lines = [
        "# Attacks",
        "",
        f"What do hostile commands and damaged files do? Of {cases * len(counts):,} cases {held:,} end with the right "
        "result or with one line of reason. For contributors: `make attack`.",
        "",
        f"```bash\npython scripts/attack.py --cases {cases}\n```",
        "",
        ", ".join(f"{name} {version}" for name, version in record["versions"].items()) + ".",
        "",
        f"Every case is a kind and a seed, 0 to {cases - 1}.",
        "",
        f"| kind | cases | {' | '.join(VERDICTS)} |",
        "|---" * (2 + len(VERDICTS)) + "|",
        *rows,
        "",
        *(f"- {verdict}: {text}" for verdict, text in VERDICTS.items()),
        "",
        "What cannot be seen in the bytes is another checkpoint, not a damaged one: other numbers in weights of the",
        "same names, shapes and kinds; settings such as `rms_norm_eps`, with which transformers finds and uses every",
        "tensor; other entries of a tokenizer. Logits are compared with the undamaged checkpoint's, and where they",
        "differ, those of a dense model with transformers' own. Not judged: what a damaged `rankfold.json` or",
        "`README.md` says, damaged pages of a parquet file that still decode, and texts under another suffix than",
        "their own.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
