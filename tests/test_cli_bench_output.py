"""What is printed when: rows at once for people, all at the end for programs."""

import pytest

from minfer_jax.bench.report import Column, MarkdownTable
from minfer_jax.cli.bench_output import Printer, announce


def printer(output):
    table = MarkdownTable([Column("n", 3, lambda row: str(row["n"]))])
    return Printer(output, table, lambda rows: [f"{len(rows)} rows"])


def test_for_people_every_line_comes_at_once(capsys):
    out = printer("md")
    out.head(["above"])
    assert capsys.readouterr().out == "above\n\n|   n |\n| --: |\n"
    out.row({"n": 7})
    assert capsys.readouterr().out == "|   7 |\n"
    out.foot()
    assert capsys.readouterr().out == "\n1 rows\n"


@pytest.mark.parametrize(
    ("output", "text"), [("json", '[\n  {\n    "n": 7\n  }\n]\n'), ("csv", "n\n7\n")]
)
def test_for_programs_all_comes_at_the_end(output, text, capsys):
    out = printer(output)
    out.head(["above"])
    out.row({"n": 7})
    assert capsys.readouterr().out == ""
    out.foot()
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("output", ["md", "json", "csv"])
def test_without_rows_there_is_nothing_at_the_end(output, capsys):
    printer(output).foot()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("terminal", "err"), [(True, "measuring x...\n"), (False, "")])
def test_what_comes_is_said_on_a_terminal_alone(terminal, err, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    announce("measuring x")
    assert capsys.readouterr() == ("", err)
