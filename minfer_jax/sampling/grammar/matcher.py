"""A grammar that follows a sequence of tokens, and the engine that makes them for a vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minfer_jax.errors import GrammarError, SamplingError
from minfer_jax.sampling.grammar.spec import GrammarSpec
from minfer_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Without it a mask holds, where only one text can follow, one spelling of that text alone.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_NOTHING_FITS = "NoExtensionBias"  # llguidance's word for a mask without a token
_SHOWN = 300  # characters of a message of llguidance


class _Source(NamedTuple):
    """A grammar in llguidance's dialect of Lark, and what of it is not enforced."""

    lark: str
    notes: tuple[str, ...] = ()


def _source(spec: GrammarSpec, token_id: Callable[[str], int], ends: Iterable[int] = ()) -> _Source:
    if spec.kind == "lark":
        return _Source(spec.text + _NO_FORCING)
    if spec.kind == "regex":
        from llguidance import regex_to_lark

        if (len(spec.text) - len(spec.text.rstrip("\\"))) % 2:
            raise GrammarError("regular expression: a \\ at its end stands for nothing")
        return _Source(f"start: /{regex_to_lark(spec.text, '')}/{_NO_FORCING}")
    if spec.kind == "gbnf":
        from minfer_jax.sampling.grammar.gbnf_lark import lark_of_gbnf

        return _Source(lark_of_gbnf(spec.text, token_id, ends) + _NO_FORCING)
    from minfer_jax.sampling.grammar.schema import lark_of_schema

    lark, notes = lark_of_schema(spec.text if spec.kind == "json_schema" else _ANY_OBJECT)
    return _Source(lark + _NO_FORCING, notes)


def check_grammar(spec: GrammarSpec) -> None:
    """Refuse a bad grammar without a vocabulary: whether its tokens exist is not looked at.

    GrammarError for what is malformed, impossible, too large or not supported.
    """
    from llguidance import LLMatcher

    lark = _source(spec, lambda _: 0).lark
    failed, messages = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_lark(lark), limits=_limits()
    )
    if failed:
        raise _refused(spec, messages[0])


class GrammarEngine:
    """Makes constraints for one tokenizer. The vocabulary is prepared at the first of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def constraint(self, spec: GrammarSpec) -> GrammarConstraint:
        """A constraint at its beginning.

        GrammarError for a grammar that is malformed, impossible, too large or not supported.
        """
        from llguidance import LLMatcher

        source = _source(spec, self._token_id, self._tokenizer.eog)
        matcher = LLMatcher(
            self._vocabulary,
            LLMatcher.grammar_from_lark(source.lark),
            log_level=0,
            limits=_limits(),
        )
        if matcher.is_error():
            raise _refused(spec, matcher.get_error())
        warnings = [_named(spec, warning) for warning in matcher.get_grammar_warnings()]
        notes = (*source.notes, *warnings)
        return GrammarConstraint(matcher, self._tokenizer, self._worker, notes)

    def _token_id(self, text: str) -> int:
        """The id of the one token that a grammar names by its text."""
        ids = self._tokenizer.encode(text, add_special=False, parse_special=True)
        if len(ids) != 1:
            raise GrammarError(f"{text!r} is not one token of this vocabulary, but {len(ids)}")
        return ids[0]

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from minfer_jax.sampling.grammar.tokens import ll_tokenizer

        return ll_tokenizer(self._tokenizer)

    @cached_property
    def _worker(self) -> ThreadPoolExecutor:
        """Where masks are computed ahead; llguidance lets go of the interpreter meanwhile."""
        from concurrent.futures import ThreadPoolExecutor

        return ThreadPoolExecutor(1, thread_name_prefix="grammar")


class GrammarConstraint:
    """A `Constraint` over llguidance's matcher."""

    notes: tuple[str, ...]
    """What of the grammar is not enforced, a line each."""

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: Tokenizer,
        worker: ThreadPoolExecutor,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.notes = notes
        self._matcher = matcher
        self._worker = worker
        self._n_vocab = tokenizer.n_vocab
        self._ends = tokenizer.eog
        self._piece: Callable[[int], bytes] = tokenizer.piece
        self._n_accepted = 0
        self._mask: np.ndarray | None = None
        self._coming: Future[np.ndarray] | None = None

    def prepare(self) -> None:
        """Begin to compute the next mask in a thread."""
        if self._mask is None and self._coming is None:
            self._coming = self._worker.submit(self._compute)

    def allowed(self) -> np.ndarray:
        """The tokens that may come next: bool [n_vocab], read-only.

        After an end, only ends. No True at all where the vocabulary cannot spell what must follow.
        SamplingError if the grammar is too ambiguous to go on within llguidance's limits.
        """
        if self._mask is None:
            coming, self._coming = self._coming, None
            self._mask = coming.result() if coming is not None else self._compute()
        return self._mask

    def accept(self, token: int) -> None:
        """Go on by one token; SamplingError, and no change, if it is not allowed."""
        if not 0 <= token < self._n_vocab or not self._try(token):
            raise SamplingError(
                f"token {token} is not allowed by the grammar after {self._n_accepted} tokens"
                + (f": {self._piece(token)!r}" if 0 <= token < self._n_vocab else "")
            )
        self._n_accepted += 1
        self._mask = None

    @property
    def finished(self) -> bool:
        """Whether the document is complete and nothing but an end may follow.

        Costs next to nothing before the next mask is asked for; then a document that an end token
        alone can follow without the parser having stopped may still seem unfinished.
        """
        if self._mask is None and self._coming is None:
            return self._matcher.is_stopped() and not self._matcher.is_error()
        allowed = self.allowed()
        n_allowed = int(allowed.sum())
        if self._ends:
            return 0 < n_allowed == int(allowed[list(self._ends)].sum())
        return n_allowed == 0 and self._matcher.is_stopped() and not self._matcher.is_error()

    def _try(self, token: int) -> bool:
        if self._coming is not None:
            self.allowed()  # no thread works with the matcher any more
        if self._matcher.is_stopped():
            self._check()
            return token in self._ends and not self._matcher.is_error()
        if token in self._ends:  # one that a grammar names can be fed, but not tried
            return bool(self.allowed()[token]) and self._matcher.consume_token(token)
        if self._matcher.try_consume_tokens([token]) != 1:
            self._check()
            return False
        return True

    def _compute(self) -> np.ndarray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():  # the bits hold the ends then
            self._check()
            return self._read_only(np.zeros(self._n_vocab, np.bool_))
        mask = np.unpackbits(bits, count=self._n_vocab, bitorder="little").view(np.bool_)
        return self._read_only(mask)

    def _check(self) -> None:
        """SamplingError if the matcher has failed, other than by finding nothing that fits."""
        if self._matcher.is_error():
            message = _one_line(self._matcher.get_error())
            if not message.startswith(_NOTHING_FITS):
                self._mask = None
                raise SamplingError(f"the grammar failed: {message}")

    @staticmethod
    def _read_only(mask: np.ndarray) -> np.ndarray:
        mask.flags.writeable = False
        return mask


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def _refused(spec: GrammarSpec, message: str) -> GrammarError:
    return GrammarError(_named(spec, message))


def _named(spec: GrammarSpec, message: str) -> str:
    """What llguidance says, with the kind of grammar that it says it of."""
    if spec.kind != "lark":  # the place is in a text that its author has not seen
        message = _PLACE.sub("", message)
    return f"{_NAMES[spec.kind]}: {_one_line(message)}"


_NAMES = {
    "gbnf": "grammar",
    "lark": "Lark grammar",
    "regex": "regular expression",
    "json_schema": "JSON schema",
    "json_object": "JSON object",
}
_ANY_OBJECT = '{"type": "object"}'
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_LISTING = re.compile(r"\s*(\d+ \||\^+$)|\s*$")


def _one_line(message: str) -> str:
    """A message of llguidance without the listing of the grammar around it."""
    lines = message.split("\n<")[0].splitlines()
    lines = [line.strip() for line in lines if not _LISTING.match(line)]
    text = "; ".join(lines) or "no error message"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
