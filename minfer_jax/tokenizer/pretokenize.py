"""How byte-level BPE cuts a text into words before it merges, by `tokenizer.ggml.pre`.

A rule is a list of regular expressions, each applied to what the one before it left: every match
and every gap between matches is a word. As in llama.cpp, an expression with a Unicode category
sees a *collapsed* text, one character per character, in which everything beyond ASCII is one
letter for its category. So all expressions run on Python's `re` with ASCII classes; none of them
backtracks over a long run more than once. Categories are those of the running Python.

This module does not know tokens, ids or bytes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from minfer_jax.errors import TokenizerError

WHITESPACE = frozenset(
    "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
    + "".join(map(chr, range(0x2000, 0x200B)))
)
"""Unicode's White_Space property (`str.isspace` has four control characters more)."""

# What stands for a character beyond ASCII in a collapsed text.
_SPACE, _LETTER, _NUMBER, _PUNCTUATION, _MARK, _SYMBOL, _OTHER = "\v\x80\x81\x82\x83\x84\x85"
_HAN_LETTER = "\x86"
_STANDS_FOR = {"L": _LETTER, "N": _NUMBER, "P": _PUNCTUATION, "M": _MARK, "S": _SYMBOL}
_CLASS = {
    "L": "A-Za-z" + _LETTER + _HAN_LETTER,
    "Han": _HAN_LETTER,
    "Alphabetic": "A-Za-z" + _LETTER,  # letters that are not Han
    "N": "0-9" + _NUMBER,
    "P": re.escape("!\"#%&'()*,-./:;?@[\\]_{}") + _PUNCTUATION,
    "M": _MARK,
    "S": re.escape("$+<=>^`|~") + _SYMBOL,
    # Beyond ASCII the reference does not tell upper from lower case.
    "Lu": "A-Z" + _LETTER + _HAN_LETTER,
    "Ll": "a-z" + _LETTER + _HAN_LETTER,
}
"""What `\\p{...}` of the expressions below means in a collapsed text."""


class _Table(dict[int, str]):
    """A table for `str.translate` that fills itself."""

    def __init__(self, of: Callable[[str], str]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, point: int) -> str:
        self[point] = result = self._of(chr(point))
        return result


def _collapsed(char: str) -> str:
    if char.isascii():
        return char
    if char in WHITESPACE:
        return _SPACE
    stands_for = _STANDS_FOR.get(unicodedata.category(char)[0], _OTHER)
    return _HAN_LETTER if stands_for == _LETTER and _HAN_CHARACTER.match(char) else stands_for


_COLLAPSE = _Table(_collapsed)
_ASCII_SPACES = _Table(lambda char: _SPACE if char in WHITESPACE and not char.isascii() else char)


_HAN_CHARACTER = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ebef"
    "\U0002f800-\U0002fa1f]"
)


@dataclass(frozen=True)
class Rule:
    """One way to cut texts, with the switches that llama.cpp ties to its name."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token is not merged."""
    add_bos: bool = False
    """The default of `add_bos_token`."""
    has_bos: bool = True
    """Whether there is a BOS id if the file names none."""
    add_sep: bool = False
    """The default of `add_sep_token`."""

    def split(self, text: str) -> list[str]:
        """The words of `text`, none empty, which joined are `text`."""
        ends: Iterable[int] = (len(text),)
        # Both forms have one character for each of the text's: positions carry over.
        collapsed = normal = text
        if not text.isascii():
            collapsed, normal = text.translate(_COLLAPSE), text.translate(_ASCII_SPACES)
        for pattern, is_collapsed in self._patterns:
            ends = _cut(pattern, collapsed if is_collapsed else normal, ends)
        words: list[str] = []
        start = 0
        for end in ends:
            words.append(text[start:end])
            start = end
        return words if text else []

    @cached_property
    def _patterns(self) -> tuple[tuple[re.Pattern[str], bool], ...]:
        return tuple(_compiled(expression) for expression in self.expressions)


def _compiled(expression: str) -> tuple[re.Pattern[str], bool]:
    """The pattern, and whether it is for the collapsed text."""
    inside = False
    parts: list[str] = []
    for part in re.findall(r"\\p\{\w+\}|\\.|[\[\]]|[^\\\[\]]+", expression, re.DOTALL):
        if part in "[]":
            inside = part == "["
        if part.startswith(r"\p"):
            members = _CLASS[part[3:-1]]
            part = members if inside else f"[{members}]"
        parts.append(part)
    return re.compile("".join(parts), re.ASCII), r"\p{" in expression


def _cut(pattern: re.Pattern[str], text: str, ends: Iterable[int]) -> list[int]:
    """The ends of the words after cutting each word (given by its end) with `pattern`."""
    cuts: list[int] = []
    start = 0
    for end in ends:
        done = start
        # An end position hides what follows, so that a lookahead sees the end of the word.
        for match in pattern.finditer(text, start, end):
            if match.start() > done:
                cuts.append(match.start())
            done = match.end()
            cuts.append(done)
        if done < end:
            cuts.append(end)
        start = end
    return cuts


# Letters that have a case, as deepseek-llm's own tokenizer lists them.
_CASED = (
    r"\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    r"\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    r"\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    r"\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    r"\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    r"\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    r"\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    r"\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    r"\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    r"\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    r"\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    r"\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    r"\U000118a0-\U000118df\U0001e900-\U0001e943"
)

# Parts that several rules share.
_CONTRACTION = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_TAIL}"
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?\p{Lu}*\p{Ll}+<S>|[^\r\n\p{L}\p{N}]?\p{Lu}+\p{Ll}*<S>|\p{N}<N>"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKED_WORD = (  # as llama.cpp reads the published one, in which cases are told apart
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+(?:{_CONTRACTION})?|\p{{N}}<N>"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?…。\uff0c、।\u06d4،)]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[A-Za-z{_CASED}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    # Only from the start of a run: else every place of a long run is tried in vain.
    r"(?<![^\S\r\n])\s+\Z",
    _HAN,
    r"\p{N}+",
)

_DEFAULT = Rule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_RULES = {
    "default": _DEFAULT,
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Rule(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe": Rule((_LLAMA3,)),
    "chatglm-bpe": Rule((_LLAMA3,), has_bos=False),
    "glm4 glm5": Rule((_LLAMA3,), has_bos=False, ignore_merges=True),
    "minicpm5": Rule(
        (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_TAIL}"), ignore_merges=True
    ),
    "deepseek-llm": Rule(_DEEPSEEK_LLM),
    "deepseek-coder": Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Rule((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3)),
    "falcon": Rule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Rule(
        (r"\p{N}", _GPT2)
    ),
    "gpt-2 mpt olmo jais trillion granite-docling exaone4 phi-2 jina-es jina-de gigachat "
    "jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert": Rule((_GPT2,)),
    "jina-v1-en jina-v2-code roberta-bpe": Rule((_GPT2,), add_sep=True),
    "qwen2 stablelm2 hunyuan solar-open megrez grok-2 deepseek-r1-qwen kormo f2llmv2": Rule(
        (_QWEN2,)
    ),
    "qwen35": Rule(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "ufakzeka": Rule((rf"{_WORD}|\p{{N}}|{_TAIL}",)),
    "laguna": Rule((r"[^\n]+|[\n]+", _QWEN2)),
    "seed-coder": Rule(
        (
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "bailingmoe bailingmoe2 llada-moe": Rule(
        (
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Rule(
        (_CASED_WORD.replace("<S>", f"(?:{_CONTRACTION})?").replace("<N>", "{1,3}"),)
    ),
    "tekken": Rule(
        (_CASED_WORD.replace("<S>", "").replace("<N>", ""),), ignore_merges=True, add_bos=True
    ),
    "youtu": Rule(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+"
            "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
            f"|[\u3105-\u312f]+|{_HAN_KANA}",
            _MARKED_WORD.replace("<N>", ""),
        ),
        ignore_merges=True,
    ),
    "tiny_aya cohere2moe": Rule(
        (
            # Numbers in threes from their right end; what precedes one stays with its first part.
            # A search begins only behind a digit: else every place of a long run is tried.
            r"(?:\A|(?<=\p{N}))[^\p{N}]*+"
            r"(?:(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*+(?!\p{N}))|\p{N}{3})",
            _MARKED_WORD.replace("<N>", "{1,3}"),
        )
    ),
    "kimi-k2": Rule(
        (
            rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?\p{{Alphabetic}}+(?:{_CONTRACTION})?|\p{{N}}{{1,3}}"
            rf"|{_TAIL}",
        )
    ),
    "poro-chat bloom gpt3-finnish": Rule((_BLOOM,)),
    "viking": Rule((_BLOOM, r"\p{N}")),
    "chameleon": Rule(
        (
            *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"[\t\n]|    |  "),
            *(r"\p{N}", r"[\p{P}!-/:-@\[-`{-\x7e]", _GPT2),
        ),
        add_bos=True,
    ),
}
_BY_NAME = {name: rule for names, rule in _RULES.items() for name in names.split()}


def rule_of(pre: str | None) -> Rule:
    """The rule of a `tokenizer.ggml.pre` name; without one the default, as llama.cpp takes it.

    TokenizerError names an unknown one and lists those that are known.
    """
    if not pre:
        return _DEFAULT
    if pre not in _BY_NAME:
        raise TokenizerError(
            f"unsupported pre-tokenizer tokenizer.ggml.pre = {pre!r}; supported: "
            + ", ".join(rule_names())
        )
    return _BY_NAME[pre]


def rule_names() -> list[str]:
    """Every name that `rule_of` knows."""
    return sorted(_BY_NAME)
