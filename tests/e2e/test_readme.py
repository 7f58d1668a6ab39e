"""What the README and the first pages of the docs show is run: Python and commands, with a tiny local model and text."""

import io
import re
import shlex
import sys
from pathlib import Path

import pytest

import rankfold
from rankfold.architectures.models import MODELS
from rankfold.cli import main
from saved import save_text, save_tiny

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("index.md", "calibrate.md"))]
SMALL = "--num-samples 4 --max-length 32"
# Command -> what makes it small and local.
LOCAL = {
    "plan": SMALL,
    "compress": f"{SMALL} --rank-multiple 2",
    "calibrate": SMALL,
    "evaluate": "--limit 2 --max-length 32",
    "recover": "--teacher model --calibration text.txt --tokens 128 --max-length 32",
    "generate": "--max-new-tokens 3",
    "chat": "--max-new-tokens 3",
}
MOMENTS = {"--num-samples", "4", "--max-length", "32"}  # are of the moments, where these are given


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def local(text: str) -> str:
    """The same code on a model and texts that are here."""
    text = text.replace("HuggingFaceTB/SmolLM2-135M", "model").replace("MODEL", "model")
    return text.replace("my-text.txt", "text.txt").replace("--text wikitext2", "--text text.txt")


@pytest.fixture
def place(tmp_path, monkeypatch):
    save_tiny(tmp_path / "model")
    save_text(tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_python_runs(place, monkeypatch, page):
    compress = rankfold.compress

    def small(*args, **kwargs):
        found = {"calibration": "text.txt"} | kwargs | {"num_samples": 4, "max_length": 32, "rank_multiple": 2}
        return compress(*args, **found)

    monkeypatch.setattr(rankfold, "compress", small)
    code = "\n".join(map(local, blocks(page, "python")))
    exec(compile(code, page.name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_commands_run(place, monkeypatch, capsys, page):
    code = "\n".join(map(local, blocks(page, "bash")))
    lines = [line.partition("#")[0] for line in code.splitlines() if line.startswith("rankfold")]
    assert len(lines) >= 3
    for line in lines:
        command, *given = shlex.split(line)[1:]
        if command == "push":  # needs a hub: tests/exports/test_push.py
            continue
        extra = shlex.split(LOCAL.get(command, ""))
        if "--moments" in given:
            extra = [word for word in extra if word not in MOMENTS]
        elif command in ("plan", "compress", "calibrate") and "--calibration" not in given:
            extra += ["--calibration", "text.txt"]
        monkeypatch.setattr(sys, "argv", ["rankfold", command, *given, *extra])
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code in (0, None, *([3] if command == "recover" else [])), capsys.readouterr().err


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_readme_counts_the_models_that_are_listed():
    assert f"**{len(MODELS)} model families**" in README


def test_links_of_the_readme_are_absolute_and_their_pages_exist():
    links = re.findall(r"\]\((.*?)\)", README)
    assert links and all(link.startswith("https://") for link in links)
    docs = "https://rankfold.github.io/rankfold/"
    for link in links:
        name, _, anchor = link.removeprefix(docs).partition("#")
        if link.startswith(docs):
            page = ROOT / "docs" / (f"{name.rstrip('/')}.md" if name else "index.md")
            page = page if page.exists() else ROOT / "docs" / name / "index.md"
            assert page.exists(), link
            headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
            assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, link
        for branch in (
            "https://github.com/rankfold/rankfold/blob/main/",
            "https://raw.githubusercontent.com/rankfold/rankfold/main/",
        ):
            if link.startswith(branch):
                assert (ROOT / link.removeprefix(branch)).exists(), link
