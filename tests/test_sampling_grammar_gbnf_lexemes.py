"""`sampling.grammar.gbnf_lexemes`: how grammars fall into lexemes."""

from minfer_jax.sampling.grammar.gbnf import parse_gbnf
from minfer_jax.sampling.grammar.gbnf_lexemes import choose_lexemes
from minfer_jax.sampling.grammar.gbnf_nodes import Alt, Chars, Grammar, Ref, Repeat, Token


def spelled(grammar: Grammar, node: int) -> str:
    """A lexeme with its rules put in, blanks left out."""
    found = grammar.nodes[node]
    if isinstance(found, Chars):
        low, high = found.ranges[0]
        return chr(low) if low == high else f"[{chr(low)}-{chr(high)}]"
    if isinstance(found, Token):
        return f"<{found.id}>"
    if isinstance(found, Ref):
        return spelled(grammar, grammar.rules[found.name])
    below = [spelled(grammar, child) for child in grammar.nodes.children(node)]
    if isinstance(found, Alt):
        return f"({'|'.join(below)})"
    if isinstance(found, Repeat):
        high = "" if found.high is None else found.high
        return f"{below[0]}{{{found.low},{high}}}"
    return "".join(below)


def lexemes(text: str) -> set[str]:
    grammar = parse_gbnf(text)
    chosen = choose_lexemes(grammar)
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [chosen.root]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if chosen.leaf(node):
            found.add(spelled(grammar, node))
        else:
            waiting.extend(chosen.pieces(node))
    return found


def test_a_regular_grammar_is_one_lexeme():
    """Though its words overlap: an automaton of the whole follows them all."""
    assert lexemes('root ::= word+ "ing"\nword ::= [a-z] | "ab"') == {"(ab|[a-z]){1,}ing"}


def test_regular_neighbours_are_joined():
    assert lexemes('root ::= "let " name "=" root ";" | [0-9]+\nname ::= [a-z]+') == {
        "let [a-z]{1,}=",
        ";",
        "[0-9]{1,}",
    }


def test_a_lexeme_that_may_go_on_where_it_ends_is_taken_apart():
    """After digits, a digit may belong to either; after a parenthesis it may not."""
    assert lexemes('root ::= [0-9]+ root [0-9]+ | "y" root "z" | "x"') == {"[0-9]", "x", "y", "z"}
    assert lexemes('root ::= "(" root ")" [0-9]+ | [0-9]') == {"(", ")[0-9]{1,}", "[0-9]"}


def test_what_may_be_empty_lets_through_what_follows():
    assert lexemes('root ::= [0-9]+ nest [0-9]\nnest ::= "(" nest ")" | " "*') == {
        "[0-9]",
        "(",
        ")",
        " {0,}",
    }


def test_blanks_before_blanks_are_single_characters():
    assert lexemes('root ::= "(" root ws ")" ws | "c"\nws ::= [ ]*') == {"(", " ", ")", "c"}


def test_blanks_before_others_stay_whole():
    assert lexemes('root ::= "a" ws root "b" ws | "c"\nws ::= [ ]*') == {
        "a {0,}",
        "b {0,}",
        "c",
    }


def test_a_word_that_another_one_continues_is_taken_apart_only_if_it_matters():
    """`in` before a digit is no problem where `int` is possible; before a `t` it is."""
    assert lexemes('root ::= "in" [0-9] root "." | "int" root | "."') == {"in[0-9]", ".", "int"}
    assert lexemes('root ::= "in" item | "int" root | "."\nitem ::= "t" root "!"') == set("int!.")


def test_keywords_and_names_stay_words():
    found = lexemes(
        'root ::= "return" ws value ";" | name ws "(" value ")" ";"\n'
        'value ::= name | "(" value ")"\nname ::= [a-z]+\nws ::= " "+'
    )
    assert {"return", "[a-z]{1,}", " {1,}"} <= found


def test_what_is_made_of_more_is_taken_apart_first():
    """A name before a blank, where a keyword with its blanks may stand."""
    found = lexemes(
        'root ::= type nest ";" | name gap root | "."\ntype ::= ("int" | "char") " "+\n'
        'name ::= [a-z]+\nnest ::= "(" nest ")" | "x"\ngap ::= "(" gap ")" | " "'
    )
    assert found == {"(int|char)", " {1,}", "[a-z]{1,}", " ", "(", ")", "x", ";", "."}


def test_tokens_are_leaves():
    assert lexemes('root ::= <[5]> "ab" [c] <[6]>') == {"<5>", "abc", "<6>"}


def test_too_much_to_find_out_is_single_characters():
    rules = "".join(f'\nw{i} ::= "ab" w{(i + 1) % 4000} "c" | "x"' for i in range(4000))
    assert lexemes(f"root ::= w0{rules}") == {"a", "b", "c", "x"}
