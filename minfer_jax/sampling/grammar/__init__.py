"""From a grammar to the tokens that may come next.

A request's `GrammarSpec` (GBNF, Lark, a regular expression, a JSON schema) and the vocabulary of a
`GrammarEngine` make a `Constraint`, which a sampler asks for a mask before each choice. The parser
behind it is llguidance's; this room gives it the vocabulary and the grammar, and checks both. It
knows neither models nor contexts, and imports llguidance only when a grammar is asked for.
"""

from minfer_jax.sampling.grammar.matcher import GrammarConstraint, GrammarEngine, check_grammar
from minfer_jax.sampling.grammar.spec import GrammarSpec, grammar_spec

__all__ = ["GrammarConstraint", "GrammarEngine", "GrammarSpec", "check_grammar", "grammar_spec"]
