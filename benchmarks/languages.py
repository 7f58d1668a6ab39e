"""Text in nine languages other than English, out of the translated manual pages and answers of Debian (GPL and others).

Needs `apt-get` and `dpkg-deb`, and takes a minute. The file goes to FOLDER/calibration/languages.jsonl, a page a row.

    python benchmarks/languages.py "$RANKFOLD_DATA"
"""

import gzip
import html
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PAGES = [f"manpages-{language}" for language in ["de", "es", "fr", "it", "ja", "pl", "pt-br", "ru", "zh"]]
ANSWERS = [f"debian-faq-{language}" for language in ["de", "fr", "it", "ja", "ru", "zh-cn"]]
EACH, SHORTEST, LONGEST = 40, 1500, 6000  # documents of a package, characters of a document
NAME = "calibration/languages.jsonl"


def main() -> None:
    order, documents = random.Random(0), []
    with tempfile.TemporaryDirectory() as place:
        for package in sorted(PAGES + ANSWERS):
            subprocess.run(["apt-get", "download", "-qq", package], cwd=place, check=True)
            (archive,) = Path(place).glob(f"{package}_*.deb")
            folder = Path(place) / package
            subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
            long = [text[:LONGEST] for text in texts(folder) if len(text) >= SHORTEST]
            order.shuffle(long)
            documents += long[:EACH]
    order.shuffle(documents)
    output = Path(sys.argv[1]) / NAME
    output.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents))
    print(f"wrote {len(documents)} documents to {output}")


def texts(folder: Path) -> Iterator[str]:
    """Yield the documents of a package, by the names of their files, without markup."""
    for file in sorted(file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()):
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        name = file.name.removesuffix(".gz")
        if re.fullmatch(r"man\d\w*", file.parent.name):
            lines = [line for line in raw.decode().splitlines() if line and line[0] not in ".'"]
            text = re.sub(r"\\f[A-Z]|\\-|\\&|\\\(..|\\", "", " ".join(lines))
        elif name.endswith(".html"):
            text = html.unescape(re.sub(r"<style.*?</style>|<[^>]+>", " ", raw.decode(), flags=re.DOTALL))
        elif name.endswith(".txt"):
            text = raw.decode()
        else:
            continue
        yield re.sub(r"\s+", " ", text).strip()


if __name__ == "__main__":
    main()
