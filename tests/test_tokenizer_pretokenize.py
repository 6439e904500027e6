"""`tokenizer.pretokenize`: words by rule, against hand-worked cases and published expressions."""

import re

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from minfer_jax.errors import TokenizerError
from minfer_jax.tokenizer.pretokenize import rule_names, rule_of

DIGITS = "1234567"


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-4o", "deepseek-v3", "joyai-llm"])
def test_t07_up_to_three_digits_from_the_left(pre):
    rule = rule_of(pre)
    assert rule.split(DIGITS) == ["123", "456", "7"]
    words = rule.split("rfid501.go 1234567 ١٢٣ ½ Ⅷ")
    assert "501" in words and "١٢٣" in words
    assert [words[i : i + 3] for i, w in enumerate(words) if w == "123"] == [["123", "456", "7"]]


@pytest.mark.parametrize("pre", ["qwen2", "smollm", "starcoder", "command-r", "deepseek-coder"])
def test_t07_single_digits(pre):
    words = rule_of(pre).split("rfid501.go 1234567 ١٢٣ ½ Ⅷ")
    assert [w for w in words if w.strip().isdecimal()] == list("5011234567١٢٣")
    assert "½" in words and "Ⅷ" in words


def test_t07_other_digit_rules():
    assert rule_of("gpt-2").split(DIGITS) == [DIGITS]
    assert rule_of("falcon").split(DIGITS) == ["123", "456", "7"]
    assert rule_of("deepseek-llm").split(DIGITS) == [DIGITS]
    assert rule_of("default").split("12345") == ["123", "45"]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'm  here 42!?\n\n x", ["I", "'m", " ", " here", " 42", "!?", "\n\n", " x"]),
        ("gpt-2", "a \t b", ["a", " \t", " b"]),
        ("gpt-2", "trailing  ", ["trailing", "  "]),
        ("llama-bpe", "WE'LL don't", ["WE", "'LL", " don", "'t"]),
        ("llama-bpe", "x!\r\n\n y", ["x", "!\r\n\n", " y"]),
        ("llama-bpe", " \n \n  z", [" \n \n", " ", " z"]),
        ("qwen2", "\u3000全角 ok", ["\u3000全角", " ok"]),
        ("smollm", "v1.2", ["v", "1", ".", "2"]),
        ("falcon", "a$b+1", ["a", "$", "b", "+", "1"]),
        ("deepseek-coder", "x\n\ny 你好1", ["x", "\n", "\n", "y", " ", "你好", "1"]),
        # Its punctuation class runs from `:` to `~`, and so cuts ASCII letters out again.
        ("deepseek-llm", "Été 你好!! a  ", ["É", "t", "é", " ", "你好", "!!", " a", "  "]),
        ("gpt-4o", "XMLHttp's camelCase", ["XMLHttp's", " camel", "Case"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("bloom", "a, b. c", ["a", ",", " b", ".", " c"]),
        ("laguna", "a\n\n b", ["a", "\n\n", " b"]),
        ("qwen35", "e\u0301a", ["e\u0301a"]),
        ("qwen2", "e\u0301a", ["e", "\u0301a"]),
        ("roberta-bpe", "I'm  here 42!?", ["I", "'m", " ", " here", " 42", "!?"]),
        (
            "youtu",
            "12 你好。」a가 e\u0301's",
            ["1", "2", " ", "你好", "。」", "a", "가", " e\u0301's"],
        ),
        ("youtu", "camelCase/\n/", ["camelCase", "/\n/"]),
        ("tiny_aya", "1234567 12a", ["1", "234", "567", " ", "12", "a"]),
        ("tiny_aya", "a  1234½", ["a", " ", " ", "12", "34½"]),
        ("tiny_aya", "x1234567890", ["x", "1", "234", "567", "890"]),
        ("tiny_aya", "e\u0301T's 12", ["e\u0301T's", " ", "12"]),
        (
            "kimi-k2",
            "  你好 ok's你's 1234!\n",
            [" ", " ", "你好", " ok's", "你", "'s", " ", "123", "4", "!\n"],
        ),
        ("kimi-k2", "漢字abcカ", ["漢字", "abcカ"]),
        ("kimi-k2", "!你 e\u0301a", ["!", "你", " e", "\u0301a"]),
    ],
)
def test_words_worked_by_hand(pre, text, words):
    assert rule_of(pre).split(text) == words


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUBLISHED = {
    "llama-bpe": [
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}]*[\p{Ll}\p{Lm}\p{Lo}]+"
        + CONTRACTIONS
        + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}]+[\p{Ll}\p{Lm}\p{Lo}]*"
        + CONTRACTIONS
        + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}
"""The expressions in these models' own tokenizer files; gpt-4o's without combining marks."""

ALPHABET = "abSTLlmrevd'AZ01299 \t\n\r.,!?/-_$+=<>~`|#\"^½²Ⅷ٣你好ひ가\u0301\u200b\xa0\u3000…「😀ك"


@pytest.mark.parametrize("pre", sorted(PUBLISHED))
@settings(deadline=None)
@given(text=st.text(alphabet=ALPHABET, max_size=40))
def test_words_of_the_published_expressions(pre, text):
    oracle = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(e), "isolated") for e in PUBLISHED[pre]]
    )
    assert rule_of(pre).split(text) == [word for word, _ in oracle.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", rule_names())
@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_words_spell_the_text(pre, text):
    words = rule_of(pre).split(text)
    assert "".join(words) == text and all(words)


RUNS = [
    r * (131072 // len(r)) for r in ("A", ".", " ", "\n", "Aa", "\n ", "a'", "1", "1a", "  1")
] + ["字" * 30000]
RULES = sorted({rule_of(name): name for name in rule_names()}.values())


@pytest.mark.parametrize("pre", RULES)
def test_t06_long_runs_are_split(pre):
    """A rule that backtracks anew at every place of such a run would take minutes."""
    for run in RUNS:
        for text in (run, "x" + run + "1"):
            assert "".join(rule_of(pre).split(text)) == text


def test_names_of_one_rule():
    assert rule_of("llama3") is rule_of("llama-bpe") is rule_of("falcon3")
    assert rule_of("deepseek-r1-qwen") is rule_of("qwen2")
    assert rule_of("refact") is rule_of("smollm") is rule_of("command-r")
    assert rule_of("mpt") is rule_of("gpt-2")
    assert rule_of("tiny_aya") is rule_of("cohere2moe")
    assert rule_of("jina-v1-en") is rule_of("jina-v2-code") is rule_of("roberta-bpe")
    assert rule_of(None) is rule_of("") is rule_of("default")


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(TokenizerError, match=re.escape("tokenizer.ggml.pre = 'nope'")) as error:
        rule_of("nope")
    message = str(error.value)
    assert "llama-bpe" in message and "smollm" in message and "\n" not in message
