"""`sampling.sampler`: the samplers that a chain is made of, in any order."""

import numpy as np
import pytest
from fake_vocab import vocab_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling_sampler import EQUAL, INF, LOGITS, PLAIN, Recording, chi_squared, draws, row

from minfer_jax.errors import SamplingError, UsageError
from minfer_jax.sampling import DEFAULT_SAMPLERS, Sampler, SamplingParams, sampler
from minfer_jax.sampling.philox import uniform

# XTC


def test_xtc_acts_as_often_as_asked():
    logits = row(*np.log([0.6, 0.4]))
    acted = []
    one = Recording(SamplingParams(**PLAIN, xtc_probability=0.3, xtc_threshold=0.2))
    for _ in range(4000):
        one.sample(logits)
        acted.append(len(one.left.ids) == 1)
    counts = [acted.count(True), acted.count(False)]
    # The critical value at a level of 0.001 and one degree of freedom.
    assert chi_squared(counts, [0.3, 0.7]) < 10.828
    assert one.draws == 4000


def test_xtc_takes_a_random_number_at_temperature_0_too():
    one = Sampler(SamplingParams(temp=0.0, xtc_probability=0.5, xtc_threshold=0.2))
    tokens = [one.sample(row(1, 1.1)) for _ in range(50)]
    assert set(tokens) == {0, 1}
    assert one.draws == 50


# Orders and parameters of the whole chain

MANY = {
    "top_n_sigma": 2.0,
    "typical_p": 0.9,
    "xtc_probability": 1.0,
    "xtc_threshold": 0.3,
    "dynatemp_range": 0.2,
    "dynatemp_exponent": 1.5,
    "repeat_penalty": 1.2,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.3,
    "dry_multiplier": 0.8,
    "dry_sequence_breakers": (),
    "top_k": 30,
    "top_p": 0.9,
    "min_p": 0.02,
    "logit_bias": [(3, 1.5)],
}


def left(logits, prompt=(), **params):
    """What is left to draw from: ids and logits."""
    one = Recording(SamplingParams(**{**PLAIN, **params}), prompt)
    one.sample(logits)
    return dict(zip(one.left.ids.tolist(), one.left.logits.tolist(), strict=True))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_n_sigma": 1.5}, {0: 4, 1: 3, 2: 2, 3: -INF, 4: -INF}),
        ({"top_k": 2}, {0: 4, 1: 3}),
        ({"typical_p": 0.2}, {1: 3}),
        ({"top_p": 0.7}, {0: 4, 1: 3}),
        ({"min_p": 0.3}, {0: 4, 1: 3}),
        ({"min_p": 0.3, "min_keep": 3}, {0: 4, 1: 3, 2: 2}),
        ({"top_p": 0.1, "min_keep": 3}, {0: 4, 1: 3, 2: 2}),
        ({"typical_p": 0.1, "min_keep": 3}, {0: 4, 1: 3, 2: 2}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.2}, {1: 3, 2: 2, 3: 1, 4: 0}),
        (
            {"xtc_probability": 1.0, "xtc_threshold": 0.2, "min_keep": 5},
            {0: 4, 1: 3, 2: 2, 3: 1, 4: 0},
        ),
        ({"temp": 0.5}, {0: 8, 1: 6, 2: 4, 3: 2, 4: 0}),
        ({"logit_bias": {1: 5, 3: -1, 4: -INF}}, {0: 4, 1: 8, 2: 2, 3: 0, 4: -INF}),
        ({"logit_bias": [(1, 5), (1, -1)]}, {0: 4, 1: 7, 2: 2, 3: 1, 4: 0}),
        ({"repeat_penalty": 2.0}, {0: 4, 1: 1.5, 2: 1, 3: 1, 4: 0}),
        ({"frequency_penalty": 1.0}, {0: 4, 1: 1, 2: 0, 3: 1, 4: 0}),
        ({"presence_penalty": 1.0}, {0: 4, 1: 2, 2: 1, 3: 1, 4: 0}),
        # 1 2 1 2: 1 would go on with a repetition of two.
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ()}, {0: 4, 1: 2, 2: 2, 3: 1, 4: 0}),
        (
            {
                "dry_multiplier": 1.0,
                "dry_sequence_breakers": (),
                "dry_base": 3.0,
                "dry_allowed_length": 0,
            },
            {0: 4, 1: -6, 2: 1, 3: 1, 4: 0},
        ),
    ],
)
def test_each_parameter_reaches_its_sampler(params, expected):
    assert left(row(4, 3, 2, 1, 0), [1, 2, 1, 2], **params) == pytest.approx(expected)


def test_dynamic_temperature_reaches_its_sampler():
    # Two equal ones of four candidates: half of the most entropy, and 0.5 ** 2 of the range.
    params = {"temp": 1.0, "dynatemp_range": 0.5, "dynatemp_exponent": 2.0}
    assert left(row(1, 1, -999, -999), **params)[0] == pytest.approx(1 / 0.75)


def test_the_order_given_is_the_order_run():
    logits = row(3, 2.5, 2, 0)
    flat = {"temp": 100.0, "min_p": 0.5}
    assert set(left(logits, **flat, samplers=["temp", "min_p"])) == {0, 1, 2, 3}
    assert set(left(logits, **flat, samplers=["min_p", "temp"])) == {0, 1}
    late = {"top_k": 2, "presence_penalty": 2.0}
    assert set(left(logits, [0], **late, samplers=["top_k", "penalties"])) == {0, 1}
    assert set(left(logits, [0], **late, samplers=["penalties", "top_k"])) == {1, 2}


@settings(deadline=None, max_examples=200)
@given(
    LOGITS, st.permutations(DEFAULT_SAMPLERS), st.lists(st.integers(0, 9), max_size=30), st.data()
)
def test_any_order_leaves_something_to_draw(logits, order, prompt, data):
    off = data.draw(
        st.sets(st.sampled_from(sorted(MANY.keys() - {"logit_bias", "dry_sequence_breakers"})))
    )
    params = {name: value for name, value in MANY.items() if name not in off}
    params["logit_bias"] = [(0, 1.0)]
    one = Recording(SamplingParams(**params, samplers=order), prompt)
    token = one.sample(row(*logits))
    kept = one.left
    assert np.isfinite(kept.logits.max())
    assert 0 <= token < len(logits)
    assert kept.logits[kept.ids == token] > -INF
    assert len(set(kept.ids.tolist())) == len(kept.ids)
    order_of = -kept.logits if kept.ordered else kept.ids
    assert np.all(order_of[:-1] <= order_of[1:])


# Biases


def test_a_bias_comes_first_and_may_rule_out():
    assert draws(20, row(1, 2, 3), logit_bias={2: -INF}, top_k=1) == [1] * 20
    assert draws(3, row(1, 2, 3), logit_bias={0: 5}, temp=0.0) == [0] * 3
    assert draws(3, row(1, 2, 3), logit_bias={0: 5}, mirostat=2, mirostat_tau=0.01) == [0] * 3


def test_every_token_biased_away_is_an_error():
    for params in ({}, {"temp": 0.0}, {"mirostat": 1}, {"mirostat": 2}, {"top_k": 1}):
        with pytest.raises(SamplingError, match=r"^(no token is possible|only token . is left)"):
            draws(1, row(1, 2), logit_bias={0: -INF, 1: -INF}, **params)


def test_a_biased_token_must_be_in_the_vocabulary():
    params = SamplingParams(logit_bias={1: 1.0, 3: 1.0})
    message = r"^logit_bias has token 3; allowed: ids from 0 to 2$"
    with pytest.raises(UsageError, match=message):
        Sampler(params, vocab=vocab_of("abc"))
    with pytest.raises(SamplingError, match=message):
        Sampler(params).sample(row(1, 2, 3))
    assert Sampler(params, vocab=vocab_of("abcd")).bias == {1: 1.0, 3: 1.0}


def test_ignoring_the_end_rules_out_every_end_token():
    vocab = vocab_of(["a", "<end>", "b", "<stop>"], control=["<end>", "<stop>"])
    params = SamplingParams(temp=0.0, ignore_eos=True, logit_bias={1: 50.0, 0: 1.0})
    one = Sampler(params, vocab=vocab)
    assert one.bias == {1: -INF, 0: 1.0, 3: -INF}
    assert one.sample(row(1, 9, 0, 9)) == 0


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"dry_multiplier": 1.0}, "dry_sequence_breakers"),
        ({"samplers": ["infill"]}, "infill"),
    ],
)
def test_what_needs_a_vocabulary_is_refused_without_one(params, what):
    with pytest.raises(UsageError, match=f"^the sampler has no vocabulary, which {what} needs$"):
        Sampler(SamplingParams(**params))
    Sampler(SamplingParams(**params), vocab=vocab_of(["a", "<end>"], control=["<end>"]))


# DRY

REPEATING = {"temp": 0.0, "dry_multiplier": 5.0, "dry_base": 2.0, "dry_allowed_length": 2}


@pytest.mark.parametrize(("last_n", "expected"), [(64, 0), (-1, 0), (5, 0), (4, 2), (3, 2), (0, 2)])
def test_s09_the_window_of_dry(last_n, expected):
    # 0 1 2 0 1: 2 would go on with it, and leads by 1.
    params = {**REPEATING, "dry_sequence_breakers": (), "dry_penalty_last_n": last_n}
    assert draws(1, row(1, 0, 2), [0, 1, 2, 0, 1], **params) == [expected]


def test_s09_all_of_a_long_text_counts_with_minus_1():
    prompt = [0, 1, 2, *[3] * 5000, 0, 1]
    params = {**REPEATING, "dry_sequence_breakers": ()}
    assert draws(1, row(1, 0, 2, -9), prompt, **params, dry_penalty_last_n=-1) == [0]
    assert draws(1, row(1, 0, 2, -9), prompt, **params, dry_penalty_last_n=5000) == [2]


def test_s09_negative_lengths_are_refused():
    for name in ("dry_allowed_length", "dry_penalty_last_n", "repeat_last_n"):
        with pytest.raises(UsageError, match=f"^{name} is -2; allowed: integers from "):
            SamplingParams(**{name: -2})
    with pytest.raises(UsageError, match=r"^dry_allowed_length is -1; allowed: integers from 0 "):
        SamplingParams(dry_allowed_length=-1)


def test_dry_stops_at_its_breakers():
    vocab = vocab_of(["a", "b", "c", "x\n"])
    tokens = [0, 3, 1, 2, 0, 3, 1]
    for breakers, expected in ((("\n",), 2), (("?",), 0)):
        params = SamplingParams(**REPEATING, dry_sequence_breakers=breakers)
        assert Sampler(params, tokens, vocab=vocab).sample(row(1, 0, 2, 0)) == expected


def test_dry_and_penalties_have_windows_of_their_own():
    params = {**REPEATING, "dry_sequence_breakers": (), "presence_penalty": 3.0}
    # DRY subtracts 5 from 2; the penalties 3 from 1, and from 0 if the window is 2.
    prompt, logits = [0, 1, 2, 0, 1], row(1, 0, 3.5)
    assert draws(1, logits, prompt, **params, repeat_last_n=1) == [0]
    assert draws(1, logits, prompt, **params, repeat_last_n=2) == [2]


# Mirostat and adaptive-p


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_replaces_the_chain_but_for_the_temperature(version):
    params = {"mirostat": version, "mirostat_tau": 9.0, "top_k": 1, "repeat_penalty": 9.0}
    # An even distribution over many, of which top-k would leave one.
    assert len(set(draws(50, EQUAL, [0], **params))) > 30
    logits = row(*np.log([0.7, 0.3]))
    cold, warm = (draws(400, logits, **params, temp=temp).count(1) for temp in (0.3, 3.0))
    assert cold < 80 < 120 < warm


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_follows_its_parameters(version):
    one = Sampler(SamplingParams(mirostat=version, mirostat_tau=2.0, mirostat_eta=0.5, temp=1.0))
    assert one.state()["learned"] == [4.0]
    one.sample(row(0, 0))
    # One bit of surprise, one less than asked for.
    assert one.state()["learned"] == [4.5]
    assert one.draws == 1


def test_mirostat_1_knows_the_vocabularys_size(monkeypatch):
    seen = []
    monkeypatch.setattr(sampler.Mirostat, "choose", lambda self, c, n, u: seen.append((n, u)) or 0)
    Sampler(SamplingParams(mirostat=1)).sample(EQUAL)
    assert seen == [(1000, uniform(42, 1))]


def test_adaptive_p_chooses_if_it_is_listed():
    logits = row(*np.log([0.8, 0.1, 0.1]))
    on = {"adaptive_target": 0.1, "samplers": ["adaptive_p"]}
    assert draws(200, logits, **on).count(0) < 60
    assert draws(200, logits, **{**on, "adaptive_target": -1.0}).count(0) > 140
    assert draws(200, logits, **{**on, "samplers": ()}).count(0) > 140


def test_adaptive_p_follows_its_parameters():
    params = SamplingParams(adaptive_target=0.5, adaptive_decay=0.75, samplers=["adaptive_p"])
    one = Sampler(params)
    assert one.state()["learned"] == [2.0, 4.0]
    one.sample(row(0, 0))
    assert one.state()["learned"] == pytest.approx([0.5 + 0.75 * 2.0, 4.0])
    assert one.draws == 1


# Infill


def test_infill_is_in_the_chain():
    vocab = vocab_of(["a", "b", "<end>"], control=["<end>"])
    params = SamplingParams(**PLAIN, samplers=["infill"])
    assert Sampler(params, vocab=vocab).sample(row(0, 0, -1)) == 2
    assert Sampler(params, vocab=vocab).sample(row(9, 0, 0)) == 0


def test_infill_never_ends_a_text_that_must_not_end():
    vocab = vocab_of(["<end>", *"abcdefghij"], control=["<end>"])
    params = SamplingParams(samplers=["infill"], ignore_eos=True)
    one = Sampler(params, vocab=vocab)
    before = one.state()
    with pytest.raises(SamplingError, match=r"^only token 0 is left, and it has been ruled out$"):
        one.sample(np.zeros(11, np.float32))
    assert one.state() == before


def test_infill_needs_an_end():
    with pytest.raises(UsageError, match=r"^infill needs a vocabulary with an end token"):
        Sampler(SamplingParams(samplers=["infill"]), vocab=vocab_of(["a"]))
