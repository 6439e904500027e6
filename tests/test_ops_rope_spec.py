"""Frequencies and magnitude of the rotation, with linear and YaRN scaling."""

import math
import subprocess
import sys

import numpy as np
import pytest

from minfer_jax.ops.rope_spec import RopeSpec

FACTOR = 8.0


def yarn(n_rot=128, base=10000.0, n_ctx_orig=4096, **changes):
    return RopeSpec(
        style="half",
        n_rot=n_rot,
        freq_base=base,
        freq_scale=1.0 / FACTOR,
        yarn=True,
        n_ctx_orig=n_ctx_orig,
        **changes,
    )


def test_plain_frequencies():
    spec = RopeSpec(style="half", n_rot=4, freq_base=100.0)
    np.testing.assert_allclose(spec.frequencies(), [1.0, 0.1], rtol=1e-15)
    assert spec.magnitude() == 1.0


def test_linear_scaling_divides_them_all():
    spec = RopeSpec(style="half", n_rot=4, freq_base=100.0, freq_scale=0.25)
    np.testing.assert_allclose(spec.frequencies(), [0.25, 0.025], rtol=1e-15)
    assert spec.magnitude() == 1.0


@pytest.mark.parametrize(
    ("n_rot", "base", "n_ctx_orig"), [(128, 10000.0, 4096), (64, 1e6, 32768), (32, 10000.0, 2048)]
)
def test_yarn_blends_by_turns_within_the_trained_context(n_rot, base, n_ctx_orig):
    """Peng et al. 2023, section 3.2: with r(d) = L / wavelength(d), pairs with r > beta keep
    their frequency, those with r < alpha have it divided by s, and a ramp lies between.

    The ramp runs over pair numbers, as in the authors' code, between whole pairs.
    """
    alpha, beta = 1.0, 32.0
    plain = base ** (-np.arange(0, n_rot, 2) / n_rot)
    turns = n_ctx_orig / (2.0 * math.pi / plain)
    freq = yarn(n_rot, base, n_ctx_orig).frequencies()
    gamma = (freq / plain - 1.0 / FACTOR) / (1.0 - 1.0 / FACTOR)
    kept, divided = turns >= beta, turns <= alpha
    assert kept.any() and divided.any()
    np.testing.assert_allclose(gamma[kept], 1.0, atol=1e-12)
    np.testing.assert_allclose(gamma[divided], 0.0, atol=1e-12)
    ramp = gamma[np.flatnonzero(kept)[-1] : np.flatnonzero(divided)[0] + 1]
    assert len(ramp) > 3
    np.testing.assert_allclose(ramp, np.linspace(1.0, 0.0, len(ramp)), atol=1e-12)


def test_yarn_ramp_follows_its_betas():
    spec = yarn(beta_fast=8.0, beta_slow=2.0)
    plain = 10000.0 ** (-np.arange(0, 128, 2) / 128)
    turns = 4096 / (2.0 * math.pi / plain)
    blended = (spec.frequencies() < plain * (1 - 1e-9)) & (
        spec.frequencies() > plain / FACTOR * (1 + 1e-9)
    )
    assert blended.any()
    np.testing.assert_array_equal(blended, (turns < 8.0) & (turns > 2.0))


def test_yarn_of_a_context_shorter_than_every_ramp_divides_all_but_the_first():
    # No pair turns even once within 6 tokens, so the ramp is clipped to begin and end at pair 0.
    freq = yarn(n_ctx_orig=6).frequencies()
    plain = 10000.0 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(freq[1:], plain[1:] / FACTOR, rtol=1e-12)


def test_yarn_magnitude():
    assert yarn().magnitude() == pytest.approx(1.0 + 0.1 * math.log(FACTOR), rel=1e-12)
    assert yarn(attn_factor=0.5).magnitude() == pytest.approx(
        0.5 * (1.0 + 0.1 * math.log(FACTOR)), rel=1e-12
    )


def test_extra_magnitude_without_yarn():
    assert RopeSpec(style="half", n_rot=4, attn_factor=1.25).magnitude() == 1.25


def test_it_needs_no_jax():
    code = "import sys, minfer_jax.ops.rope_spec; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
