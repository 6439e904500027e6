"""`sampling.order`: llama.cpp's names, aliases and letters of samplers."""

import pytest

from minfer_jax.errors import UsageError
from minfer_jax.sampling import DEFAULT_SAMPLERS, parse_sampler_letters, parse_samplers
from minfer_jax.sampling.order import LETTERS, checked_order

# As `llama-cli --help` of llama.cpp prints them.
NAMES = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
SEQUENCE = "edskypmxt"


def test_the_default_is_llama_cpps():
    assert parse_samplers(NAMES) == DEFAULT_SAMPLERS
    assert parse_sampler_letters(SEQUENCE) == DEFAULT_SAMPLERS


def test_all_samplers_have_a_letter():
    assert parse_sampler_letters("edskypmxtia") == tuple(LETTERS)
    assert {*LETTERS} == {*DEFAULT_SAMPLERS, "infill", "adaptive_p"}


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("top-k", "top_k"),
        ("topk", "top_k"),
        ("top_k", "top_k"),
        ("TOP_K", "top_k"),
        (" top_k ", "top_k"),
        ("top-p", "top_p"),
        ("topp", "top_p"),
        ("nucleus", "top_p"),
        ("min-p", "min_p"),
        ("minp", "min_p"),
        ("typ", "typ_p"),
        ("typ-p", "typ_p"),
        ("typp", "typ_p"),
        ("top-n-sigma", "top_n_sigma"),
        ("topnsigma", "top_n_sigma"),
        ("temp", "temperature"),
        ("Temperature", "temperature"),
        ("adaptive-p", "adaptive_p"),
        ("adaptivep", "adaptive_p"),
        ("xtc", "xtc"),
        ("dry", "dry"),
        ("infill", "infill"),
        ("penalties", "penalties"),
    ],
)
def test_aliases(alias, name):
    assert parse_samplers(alias) == (name,)


def test_an_order_is_kept():
    assert parse_samplers("temp;top_k;dry") == ("temperature", "top_k", "dry")
    assert parse_sampler_letters("tkd") == ("temperature", "top_k", "dry")


@pytest.mark.parametrize("text", ["", " "])
def test_none_at_all(text):
    assert parse_samplers(text) == ()
    assert parse_sampler_letters("") == ()
    assert checked_order(()) == ()


@pytest.mark.parametrize(
    "text", ["top_q", "top_k,top_p", "top_k;", ";", "top_k;;temp", "tfs_z", "k"]
)
def test_unknown_names_are_refused(text):
    wrong = next(name for name in text.split(";") if name not in ("top_k", "temp"))
    with pytest.raises(UsageError, match=f"^unknown sampler {wrong!r}; known: penalties, dry, "):
        parse_samplers(text)


@pytest.mark.parametrize("text", ["top_k;temp;top-k", "top_p;nucleus", "temp;temperature"])
def test_repeated_names_are_refused(text):
    name = parse_samplers(text.split(";")[0])[0]
    with pytest.raises(UsageError, match=f"^sampler '{name}' is named twice$"):
        parse_samplers(text)


def test_letters_that_are_unknown_or_repeated_are_refused():
    with pytest.raises(UsageError, match=r"^unknown sampler 'f' in 'kf'; known: e \(penalties\)"):
        parse_sampler_letters("kf")
    with pytest.raises(UsageError, match=r"^unknown sampler 'K'"):
        parse_sampler_letters("K")
    with pytest.raises(UsageError, match=r"^sampler 'top_k' is named twice$"):
        parse_sampler_letters("ktk")
