"""What a run prints at its end."""

import shlex
from pathlib import Path

import typer
from rich.console import Console

from rankfold.cli import summary
from rankfold.cli.app import app


def test_a_command_to_go_on_with_takes_a_folder_whose_name_begins_like_an_option(capsys):
    summary.show_next(Path("-lead"), {"held_out": {"perplexity": 2.0}}, Console(width=200), engine=None, has_stock=True)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]
    command = typer.main.get_command(app)
    for line in lines:
        _, name, *arguments = shlex.split(line.split("  ")[0])
        context = command.commands[name].make_context(name, arguments)
        assert "-lead" in " ".join(map(str, context.params.values())), line
    assert [line.split()[1] for line in lines] == ["evaluate", "generate", "export", "push"]
