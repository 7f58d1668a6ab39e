"""Run what the README and the first pages of the docs show: Python and commands, with a tiny local model and text."""

import io
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

import pytest

import rankfold
from rankfold.architectures.models import MODELS
from rankfold.cli import main
from rankfold.cli.forms import parse_forms
from rankfold.methods import registry
from saved import save_text, save_tiny

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NAMES = (
    *(
        "index",
        "calibrate",
        "keep-quality",
        "recover",
        "fine-tune",
        "serve",
        "evaluate",
        "compare",
        "quantise",
        "gpu",
        "many-gpus",
    ),
    *("methods", "latentllm", "checkpoint", "metrics", "add-an-architecture", "add-a-method"),
)
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMES)]
SMALL = "--num-samples 8 --max-length 32"
# Command -> what makes it small and local, where the page does not give it.
LOCAL = {
    "plan": SMALL,
    "compress": f"{SMALL} --rank-multiple 2",
    "calibrate": SMALL,
    "evaluate": "--limit 2 --max-length 32",
    "recover": "--teacher model --calibration text.txt --tokens 128 --max-length 32",
    "generate": "--max-new-tokens 3",
    "chat": "--max-new-tokens 3",
    "compare": "--text-length 32 --limit 2",
    "export": f"{SMALL} --calibration text.txt",
}
SHAPES = {"--num-samples", "8", "--max-length", "32"}  # of moments, where these are given
HERE = {  # what a page shows -> the same on a model and texts that are here
    "HuggingFaceTB/SmolLM2-135M": "model",
    "MODEL": "model",
    "./my-model": "model",
    "path/to/model": "model",
    "from .spec": "from rankfold.architectures.spec",
    "/scratch": ".",
    "--text wikitext2 --text my-text.txt": "--text text.txt",
    "my-text.txt": "text.txt",
    "--text wikitext2": "--text text.txt",
    "--calibration wikitext2 --num-samples 32 --max-length 1024": f"--calibration text.txt {SMALL}",
    "rankfold,modegpt,slicegpt --sparsities 0.1,0.3": "modegpt,slicegpt --sparsities 0.3",
    "--recover 15min": "--recover 1s",
    "--protocol lowrankarena --methods rankfold,modegpt,svd-llm": "--protocol lowrankarena --methods "
    f"svd:rank_multiple=1 --sparsities 0.2 --calibration text.txt --text text.txt {SMALL}",
    "--device cuda": "--device cpu",
    "0.3 --target": "0.2 --target",  # the tiny MLP has few widths that a target takes
    "200MB": "150kB",
    "80MB:q4_0": "90kB:float16",  # of which the tiny MLP is whole blocks
    "--budget latency": "--budget flops:context=64",
    "mixture=0.7": "python-source=0.7",
    "mixture=0.8": "text.txt=0.8",
}


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.S | re.M)
    return [textwrap.dedent(block) for block in found]


def local(text: str) -> str:
    """The same code on a model and texts that are here, one command a line, without a launcher of processes."""
    text = re.sub(r"^(torchrun|accelerate launch) .* -m rankfold", "rankfold", text.replace("\\\n", " "), flags=re.M)
    text = re.sub(r" +", " ", text) if text.startswith("rankfold") else text
    for shown, here in HERE.items():
        text = text.replace(shown, here)
    return text


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a dense model, the same compressed, a config alone and a text."""
    folder = tmp_path_factory.mktemp("pages")
    save_tiny(folder / "model", blocks=2)
    save_text(folder / "text.txt")
    (folder / "only-a-config").mkdir()
    shutil.copy(folder / "model" / "config.json", folder / "only-a-config")
    sizes = {"num_samples": 8, "max_length": 32, "rank_multiple": 2}
    text = str(folder / "text.txt")
    rankfold.compress(folder / "model", 0.3, calibration=text, output=folder / "small", device="cpu", **sizes)
    return folder


@pytest.fixture
def place(models, tmp_path, monkeypatch):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_its_python_runs(place, monkeypatch, page):
    compress, recover = rankfold.compress, rankfold.recover

    def small(*args, **kwargs):
        shutil.rmtree(kwargs.get("output", "nothing"), ignore_errors=True)
        found = {"calibration": "text.txt"} | kwargs | {"num_samples": 8, "max_length": 32, "rank_multiple": 2}
        return compress(*args, **found)

    def short(*args, minutes, **kwargs):
        return recover(*args, calibration="text.txt", tokens=128, max_length=32, **kwargs)

    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))  # a page adds a method
    monkeypatch.setattr(rankfold, "compress", small)
    monkeypatch.setattr(rankfold, "recover", short)
    code = "\n".join(map(local, blocks(page, "python")))
    exec(compile(code, page.name, "exec"), {})


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=lambda page: page.name)
def test_its_commands_run(place, monkeypatch, capsys, page):
    code = "\n".join(map(local, blocks(page, "bash")))
    lines = [line.partition("#")[0] for line in code.splitlines() if line.startswith("rankfold")]
    assert lines
    for line in lines:
        command, *given = shlex.split(line)[1:]
        if command == "push":  # needs a hub: tests/exports/test_push.py
            continue
        if "-o" in given:  # two ways to make one folder, on some pages
            shutil.rmtree(given[given.index("-o") + 1], ignore_errors=True)
        monkeypatch.setattr(sys, "argv", ["rankfold", command, *given, *added(command, given)])
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        with pytest.raises(SystemExit) as stop:
            main()
        gained_nothing = [3] if "recover" in line else []
        assert stop.value.code in (0, None, *gained_nothing), f"{line}: {capsys.readouterr().err}"


def added(command: str, given: list[str]) -> list[str]:
    """What a command needs to be small and local, and does not have."""
    words = shlex.split(LOCAL.get(command, ""))
    extra = [
        word for name, value in zip(words[::2], words[1::2], strict=True) if name not in given for word in (name, value)
    ]
    if "--gpu" in given:  # goes by shapes alone
        return extra
    if command == "export" and "q4_0" not in given:  # no text is read
        return []
    if "--moments" in given:
        return [word for word in extra if word not in SHAPES]
    if command in ("plan", "compress", "calibrate") and "--calibration" not in given:
        return [*extra, "--calibration", "text.txt"]
    return extra


def test_methods_with_options_are_understood():
    (line,) = re.findall(r"^--methods (.*)$", (ROOT / "docs" / "compare.md").read_text(encoding="utf-8"), re.M)
    assert [form.name for form in parse_forms(line)] == ["modegpt"] * 3


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"\bmake ([\w-]+)`", README)
    assert targets
    for target in targets:
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
