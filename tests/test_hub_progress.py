"""The bar is on stderr or nowhere."""

import sys

import pytest

from minfer_jax.hub.progress import progress_bar, silent


@pytest.mark.parametrize("show", [False, None])
def test_silent_in_a_pipe(show, capsys):
    with progress_bar(show) as report:
        assert report is silent
        report("Downloading", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_shown_when_asked_on_stderr_alone(capsys):
    with progress_bar(True) as report:
        report("Downloading tiny", 500_000, 1_000_000)
        report("Downloading tiny", 1_000_000, 1_000_000)
        report("Unpacking tiny", 5, None)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Downloading tiny" in err and "1.0/1.0 MB" in err and "Unpacking tiny" in err


def test_shown_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar(None) as report:
        assert report is not silent
    assert capsys.readouterr().out == ""
