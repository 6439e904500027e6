"""The curves of a sweep, and the files they are written to."""

import importlib.util
from xml.etree import ElementTree

import pytest

from minfer_jax.bench.plot import Point, check_plot, lines, save_plot
from minfer_jax.errors import MinferError, UsageError


def row(n_threads, median, *, n_prompt=0, peer=None):
    figures = {"median_ts": median, "stddev_ts": 1.5}
    made = {
        "model_type": "llama 135M Q4_1",
        "cpu_info": "Some CPU",
        "n_threads": n_threads,
        "n_prompt": n_prompt,
        "n_gen": 0 if n_prompt else 64,
        **figures,
    }
    if peer:
        made["peer"] = {"name": "llama.cpp", "median_ts": peer, "stddev_ts": 0.5}
    return made


ROWS = [
    row(1, 500.0, n_prompt=128, peer=250.0),
    row(1, 100.0, peer=60.0),
    row(2, 900.0, n_prompt=128, peer=440.0),
    row(2, 180.0, peer=90.0),
]


def test_a_line_for_each_test_and_side():
    assert lines(ROWS, "n_threads") == {
        "pp128": {
            "minfer-jax": [Point(1, 500.0, 1.5), Point(2, 900.0, 1.5)],
            "llama.cpp": [Point(1, 250.0, 0.5), Point(2, 440.0, 0.5)],
        },
        "tg64": {
            "minfer-jax": [Point(1, 100.0, 1.5), Point(2, 180.0, 1.5)],
            "llama.cpp": [Point(1, 60.0, 0.5), Point(2, 90.0, 0.5)],
        },
    }


@pytest.mark.slow
def test_a_png(tmp_path):
    save_plot(tmp_path / "x.png", ROWS, "n_threads")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "panels"), [(ROWS, 2), (ROWS[1::2], 1)])
def test_an_svg_has_a_panel_for_each_kind(rows, panels, tmp_path):
    save_plot(tmp_path / "x.svg", rows, "n_threads")
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    ids = [element.get("id", "") for element in root.iter()]
    assert sum(name.startswith("axes_") for name in ids) == panels
    # Each side's line of a panel with its bars, the legend's left aside.
    assert sum(name.startswith("LineCollection") for name in ids) >= 2 * panels


def test_names_that_are_no_plot(tmp_path):
    check_plot(tmp_path / "x.PNG")
    with pytest.raises(UsageError, match=r"--plot x\.pdf: the name must end with \.png or \.svg"):
        check_plot(type(tmp_path)("x.pdf"))
    with pytest.raises(UsageError, match="no folder"):
        check_plot(tmp_path / "none" / "x.svg")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MinferError, match=r"pip install 'minfer-jax\[bench\]'"):
        check_plot(tmp_path / "x.png")
