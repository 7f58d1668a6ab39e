"""What commands print."""

from rich.table import Table

from rankfold.cli.common import emit


def test_what_steers_a_terminal_is_shown_and_not_sent(capsys):
    table = Table("column")
    table.add_row("row\x1b]0;title\x07")

    def show(out):
        out.print("name\x1b[2J\x9b1m\x7f, a [b] c\u00a0d \u00e9\n\tnext")
        out.print(table)

    emit({}, False, show)
    out = capsys.readouterr().out
    assert "name\\x1b[2J\\x9b1m\\x7f, a [b] c\u00a0d \u00e9\n" in out and "row\\x1b]0;title\\x07" in out
    assert "\x1b" not in out


def test_a_table_is_not_cut_where_no_terminal_is(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(*(f"a long name of a column {n}" for n in range(6)))
    table.add_row(*["1048/1536"] * 6)
    emit({}, False, lambda out: out.print(table))
    assert capsys.readouterr().out.count("1048/1536") == 6
