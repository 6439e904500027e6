"""Philox4x32-10 against the vectors that its authors publish (Random123's kat_vectors)."""

from __future__ import annotations

import pytest

from minfer_jax.sampling.philox import philox4x32, philox_key, uniform

KNOWN = [  # counter and key, lowest word first -> block
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "block"), KNOWN)
def test_the_authors_vectors(counter: str, key: str, block: str) -> None:
    number = sum(word << 32 * i for i, word in enumerate(words(counter)))
    low, high = words(key)
    assert philox4x32((low, high), number) == words(block)


def test_a_seed_gives_all_its_bits_to_the_key() -> None:
    assert philox_key(0x299F31D0A4093822) == (0xA4093822, 0x299F31D0)
    assert philox_key((1 << 64) - 1) == (0xFFFFFFFF, 0xFFFFFFFF)


@pytest.mark.parametrize("k", range(4))
def test_a_uniform_number_is_a_word_over_two_to_the_32(k: int) -> None:
    number = sum(word << 32 * i for i, word in enumerate(words(KNOWN[2][0])))
    seed = 0x299F31D0A4093822
    assert uniform(seed, number, k) == words(KNOWN[2][2])[k] / 2**32


def test_the_first_block_is_its_own_words() -> None:
    assert uniform(0, 0) == 0x6627E8D5 / 2**32
    assert uniform(0, 1) != uniform(0, 0) != uniform(1, 0)
    assert uniform(1 << 32, 1) != uniform(0, 1)


def test_uniform_numbers_fill_the_unit_interval() -> None:
    draws = [uniform(42, i) for i in range(1, 4001)]
    assert 0.0 <= min(draws) < 0.01 and 0.99 < max(draws) < 1.0
    assert abs(sum(draws) / len(draws) - 0.5) < 0.02
