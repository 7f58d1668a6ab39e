"""What the README shows is run: its Python and its commands, with a tiny local model and text in place of the hub's."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from rankfold.cli import main
from saved import save_text, save_tiny

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def local(text: str) -> str:
    """The same code on a model and a text that are here."""
    text = text.replace("HuggingFaceTB/SmolLM2-135M", "model")
    data = 'calibration="text.txt", num_samples=4, max_length=32, rank_multiple=2'
    return text.replace('output="small")', f'output="small", {data})')


def test_the_python_of_the_first_screen_runs(tmp_path, monkeypatch):
    save_tiny(tmp_path / "model")
    save_text(tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(local(b) for b in blocks("python"))
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "small" / "config.json").exists()


def test_the_commands_of_the_first_screen_run(tmp_path, monkeypatch, capsys):
    save_tiny(tmp_path / "model")
    save_text(tmp_path / "text.txt")
    monkeypatch.chdir(tmp_path)
    lines = [line.partition("#")[0] for b in blocks("bash") for line in b.splitlines() if line.startswith("rankfold")]
    assert len(lines) >= 3
    extra = {
        "compress": "--calibration text.txt --num-samples 4 --max-length 32 --rank-multiple 2",
        "evaluate": "--limit 2 --max-length 32",
        "generate": "--max-new-tokens 3",
        "export": "",
    }
    for line in lines:
        words = shlex.split(local(line).replace("--text wikitext2", "--text text.txt"))
        monkeypatch.setattr(sys, "argv", [*words, *extra[words[1]].split()])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code in (0, None), capsys.readouterr().err


def test_make_targets_of_the_readme_exist():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
