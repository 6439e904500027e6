"""Tiny random models of every architecture against llama.cpp's float32 logits."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import ARCHS, golden, read_spec

from minfer_jax.batch import Batch
from minfer_jax.models.registry import ARCHITECTURES

TOLERANCE = 1e-3  # of the logits' standard deviation


def error(name: str, logits: np.ndarray) -> float:
    """The largest deviation from the golden, in standard deviations of the logits."""
    want = golden(name)[1]
    assert logits.shape == want.shape and logits.dtype == np.float32
    return float(np.abs(logits - want).max() / want.std())


def test_all_named_architectures_have_a_golden():
    named = (
        "llama-dense llama-gqa-dense llama-yarn-dense llama-linear-dense"
        " qwen2-dense qwen2-gqa-dense qwen3-dense gemma3-dense gemma2-dense cohere2-dense"
        " mamba-dense mamba2-dense rwkv6-dense rwkv7-head64-dense jamba-dense lfm2-dense"
        " falcon-h1-dense granitehybrid-dense nemotron_h-dense qwen3next-moe qwen35-dense"
        " deepseek2-moe"
    )
    assert set(named.split()) <= set(ARCHS)
    values = [dict((key, value) for key, _, value in read_spec(name)["kv"]) for name in ARCHS]
    with_logits = set(ARCHITECTURES) - {"bert", "nomic-bert", "jina-bert-v2"}
    assert {kv["general.architecture"] for kv in values} == with_logits


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("n_ubatch", [512, 20])
def test_logits(load_tiny, name, n_ubatch):
    lm = load_tiny(name, n_ubatch=n_ubatch)
    assert error(name, lm.logits(golden(name)[0])) < TOLERANCE


@pytest.mark.parametrize("name", ARCHS)
def test_fast_mode(load_tiny, name):
    """Native kernels where there are some, float16 K and V: of float weights only these round."""
    lm = load_tiny(name, exact=False, n_ubatch=20)
    logits, want = lm.logits(golden(name)[0]), golden(name)[1]
    assert error(name, logits) < 0.02
    assert (logits.argmax(axis=1) == want.argmax(axis=1)).mean() > 0.97


@pytest.mark.parametrize("name", ARCHS)
def test_token_by_token_in_two_interleaved_sequences(load_tiny, name):
    """Sequence 1 first gets the tokens in one batch, then both one at a time, 0 behind 1."""
    tokens = golden(name)[0]
    n, half = len(tokens), len(tokens) // 2
    context = load_tiny(name).context(n_ctx=2 * n, n_seq_max=2)
    batch = Batch(token=tokens[:half], seq_id=[1] * half, logits=[True] * half)
    assert context.decode(batch) == 0
    rows: list[list[np.ndarray]] = [[], list(context.all_logits())]
    for i in range(n):
        seqs = [1, 0] if half + i < n else [0]
        at = [half + i, i] if len(seqs) == 2 else [i]
        batch = Batch(token=[tokens[p] for p in at], pos=at, seq_id=seqs, logits=[True] * len(seqs))
        assert context.decode(batch) == 0
        for seq, row in zip(seqs, context.all_logits(), strict=True):
            rows[seq].append(row)
    assert error(name, np.stack(rows[0])) < TOLERANCE
    assert error(name, np.stack(rows[1])) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "wrong"), [("llama-dense", "half"), ("qwen2-dense", "interleaved")]
)
def test_g10_the_other_pairing_of_rope_components_is_another_model(load_tiny, name, wrong):
    """Rows of q and k are stored permuted for `llama` alone; mixed up, all looks healthy."""
    lm = load_tiny(name)
    lm.model.hp = replace(lm.model.hp, rope=replace(lm.model.hp.rope, style=wrong))
    assert error(name, lm.logits(golden(name)[0])) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["llama-gqa-dense", "gemma3-dense"])
def test_masked_form(load_tiny, name):
    lm = load_tiny(name, flash_attn=False)
    assert error(name, lm.logits(golden(name)[0])) < TOLERANCE
