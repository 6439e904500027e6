"""`tokenizer.special`: which ids are special, which end a generation, and how text is split."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer.special import Splitter, find_special, mark_stripping
from minfer_jax.tokenizer.vocab import CONTROL, read_vocab

NORMAL_TYPE, UNKNOWN_TYPE, CONTROL_TYPE, USER_TYPE = 1, 2, 3, 4


def build(*tokens, types=None, defaults=None, strip=None, **values):
    metadata = {"tokenizer.ggml.tokens": list(tokens)}
    metadata |= {f"tokenizer.ggml.{key}_token_id": value for key, value in values.items()}
    if types is not None:
        metadata["tokenizer.ggml.token_type"] = np.array(types)
    table = read_vocab(metadata)
    special = find_special(metadata, table, defaults or {})
    mark_stripping(strip or {}, table)
    return table, special


def test_defaults_hold_only_inside_the_vocabulary():
    _, special = build("a", "b", defaults={"bos": 1, "eos": 2, "unknown": 0})
    assert (special.bos, special.eos, special.unk) == (1, None, 0)


def test_g05_an_eos_id_outside_the_vocabulary():
    with pytest.raises(TokenizerError, match=r"eos_token_id is 4294967295.* ids 0\.\.0"):
        build("a", eos=4294967295)


@pytest.mark.parametrize("value", [-1, True, 1.0, "1"])
def test_an_id_that_is_no_id(value):
    with pytest.raises(TokenizerError, match="bos_token_id"):
        build("a", "b", bos=value)


def test_ids_without_use_are_ignored_when_bad():
    _, special = build("a", padding=7, fim_pad=9)
    assert special.eog == frozenset()


def test_end_of_turn_is_the_one_that_is_not_eos():
    _, special = build("x", "<|endoftext|>", "<|im_end|>", eos=1)
    assert (special.eot, special.eog) == (2, {1, 2})
    _, special = build("x", "<|endoftext|>", "<|im_end|>", eos=2)
    assert (special.eot, special.eog) == (1, {1, 2})
    _, special = build("x", "<|endoftext|>", eos=1)
    assert special.eot == 1


def test_end_tokens_by_text_become_control_tokens():
    table, special = build("a", "</s>", "<end_of_turn>", "<|file_sep|>", "<|fim_prefix|>", eos=0)
    assert special.eog == {0, 1, 2, 3}
    assert [table.has(i, CONTROL) for i in range(5)] == [False, True, True, True, True]


def test_declared_ids_end_a_generation():
    _, special = build("a", "b", "c", "d", eos=0, eot=1, eom=2, fim_rep=3)
    assert special.eog == {0, 1, 2, 3}


def test_families_in_which_an_end_token_is_none():
    _, special = build("<|end|>", "<|return|>", "<|call|>", eos=1)
    assert special.eog == {1, 2}
    _, special = build("</s>", "<|tool_response>")
    assert special.eog == {1}


def test_control_tokens_are_split_off_only_when_parsed():
    table, _ = build("<c>", "<u>", "<k>", types=[CONTROL_TYPE, USER_TYPE, UNKNOWN_TYPE])
    splitter = Splitter(table)
    assert splitter.split("a<c>b<u>c<k>", True) == ["a", 0, "b", 1, "c", 2]
    assert splitter.split("a<c>b<u>c<k>", False) == ["a<c>b", 1, "c<k>"]
    assert splitter.split("", True) == []


def test_t03_longer_tokens_first():
    table, _ = build("\t", "\t\t\t", "\t\t", types=[USER_TYPE] * 3)
    assert Splitter(table).split("\t" * 6 + "test", False) == [1, 1, "test"]
    assert Splitter(table).split("\t" * 5, False) == [1, 2]


def test_a_long_token_wins_over_a_short_one_further_left():
    table, _ = build("ab", "bcd", types=[USER_TYPE] * 2)
    assert Splitter(table).split("abcd", False) == ["a", 1]


def test_phi3_tokens_swallow_the_space_behind_them():
    table, _ = build(
        "<s>", "<|user|>", types=[CONTROL_TYPE] * 2, strip={"general.name": "Phi-3 mini"}
    )
    assert Splitter(table).split("<|user|> \n hi<s> x", True) == [1, "hi", 0, " x"]


def test_jina_mask_swallows_the_space_before_it():
    strip = {"tokenizer.ggml.pre": "jina-v2-code"}
    table, _ = build("<mask>", types=[CONTROL_TYPE], strip=strip)
    assert Splitter(table).split("a \t<mask> b", True) == ["a", 0, " b"]


@settings(deadline=None)
@given(st.text(alphabet="ab<>|", max_size=40), st.booleans())
def test_fragments_spell_the_text(text, parse):
    tokens = ["<a>", "<|", "ab", "<", "b>|"]
    table, _ = build(*tokens, types=[CONTROL_TYPE, USER_TYPE, USER_TYPE, CONTROL_TYPE, USER_TYPE])
    fragments = Splitter(table).split(text, parse)
    assert "".join(tokens[f] if isinstance(f, int) else f for f in fragments) == text
