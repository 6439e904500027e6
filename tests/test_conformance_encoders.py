"""Tiny random encoders against llama.cpp's float32 embeddings, pooled in every way.

`NAME-dense` are the architectures' plain forms; the others have the parts that only some files have
(fused or separate Q, K, V with biases, norms of heads, gates, classifiers), and `qwen3-rank` is a
decoder with a classifier. Each golden holds the vectors of 40 `tokens` as one sequence (`none`,
`mean`, `cls`, `last`, `rank`) and the means of two sequences in one batch (`two`, `seq_id`).
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny

from minfer_jax.batch import Batch
from minfer_jax.errors import ContextFullError
from minfer_jax.lm import load
from minfer_jax.pooling import normalize, pool
from minfer_jax.settings import Settings

DATA = Path(__file__).parent / "data" / "encoders"
NAMES = sorted(path.stem for path in DATA.glob("*.json"))
ENCODERS = [name for name in NAMES if "bert" in name]
TOLERANCE = 1e-3  # of the hidden states' standard deviation; llama.cpp's GELU is a table of halves


def golden(name):
    with np.load(DATA / f"{name}.npz") as data:
        return dict(data)


def error(name, vector, kind):
    want = golden(name)[kind]
    assert vector.shape == want.shape and vector.dtype == np.float32
    return float(np.abs(vector - want).max() / golden(name)["none"].std())


@pytest.fixture(scope="module")
def load_encoder(tmp_path_factory):
    folder, home = tmp_path_factory.mktemp("encoders"), tmp_path_factory.mktemp("home")

    def lm(name, *, exact=False, n_ctx=64, quantize=None):
        path = folder / f"{name}{'-q' if quantize else ''}.gguf"
        if not path.exists():
            spec = json.loads((DATA / f"{name}.json").read_text())
            write_tiny(spec, path, quantize=quantize)
        return load(path, n_ctx=n_ctx, exact=exact, settings=Settings(home=home))

    return lm


def test_every_architecture_and_every_form_has_a_golden():
    assert {"bert-dense", "nomic-bert-dense", "jina-bert-v2-dense"} < set(ENCODERS)
    assert len(NAMES) == 8 and {"bert-rank", "jina-bert-v2-code", "qwen3-rank"} < set(NAMES)


# In its fast form a decoder keeps keys and values as halves, which is another figure.
@pytest.mark.parametrize(
    ("name", "exact"), [*((name, True) for name in NAMES), *((name, False) for name in ENCODERS)]
)
def test_all_poolings(load_encoder, name, exact):
    lm, ids = load_encoder(name, exact=exact), golden(name)["tokens"].tolist()
    for kind in ("none", "mean", "cls", "last"):
        assert error(name, lm.embed(ids, kind, normalize=False), kind) < TOLERANCE


@pytest.mark.parametrize("name", [name for name in NAMES if "rank" in golden(name)])
def test_scores_of_a_classifier(load_encoder, name):
    ids = golden(name)["tokens"].tolist()
    scores = load_encoder(name, exact=True).embed(ids, "rank")
    np.testing.assert_allclose(scores, golden(name)["rank"], atol=5e-4)


@pytest.mark.parametrize(("name", "kind"), [("bert-rank", "rank"), ("nomic-bert-split", "mean")])
def test_the_files_own_pooling(load_encoder, name, kind):
    lm, ids = load_encoder(name), golden(name)["tokens"].tolist()
    np.testing.assert_array_equal(lm.embed(ids), lm.embed(ids, kind))


def test_vectors_have_length_one_unless_told_otherwise(load_encoder):
    lm, ids = load_encoder("bert-dense"), golden("bert-dense")["tokens"].tolist()
    plain = lm.embed(ids, "mean", normalize=False)
    np.testing.assert_allclose(lm.embed(ids, "mean"), plain / np.linalg.norm(plain), rtol=1e-5)
    np.testing.assert_array_equal(lm.embed(ids, "mean", normalize=0), normalize(plain, 0))


@pytest.mark.parametrize("name", ENCODERS)
def test_two_interleaved_sequences_in_one_batch(load_encoder, name):
    tokens, seq_id, two = (golden(name)[key] for key in ("tokens", "seq_id", "two"))
    context = load_encoder(name).context(n_ctx=64, n_seq_max=2, embeddings=True)
    batch = Batch(token=tokens.tolist(), seq_id=seq_id.tolist(), logits=[True] * 40)
    assert context.decode(batch) == 0
    hidden = context.embeddings()
    assert hidden.shape == (40, two.shape[1])
    for seq in (0, 1):
        np.testing.assert_allclose(pool(hidden[seq_id == seq], "mean"), two[seq], atol=5e-4)


@pytest.mark.parametrize("name", NAMES)
def test_several_texts_at_once(load_encoder, name):
    tokens, seq_id, two = (golden(name)[key] for key in ("tokens", "seq_id", "two"))
    texts = [tokens[seq_id == seq].tolist() for seq in (0, 1)]
    out = load_encoder(name, exact=True).embed(texts, "mean", normalize=False)
    np.testing.assert_allclose(out, two, atol=5e-4)


@pytest.mark.parametrize("name", ["bert-rank", "jina-bert-v2-code", "nomic-bert-split"])
def test_a_text_does_not_see_those_beside_it(load_encoder, name):
    lm, tokens = load_encoder(name), golden(name)["tokens"].tolist()
    texts = [tokens[:1], tokens[:7], tokens[3:20], tokens]
    together = lm.embed(texts, "none", normalize=False)
    for text, vectors in zip(texts, together, strict=True):
        alone = lm.embed(text, "none", normalize=False)
        np.testing.assert_allclose(vectors, alone, atol=2e-5)


@pytest.mark.parametrize("name", ["bert-rank", "jina-bert-v2-code"])
def test_hidden_states_of_the_rows_that_were_asked_for(load_encoder, name):
    tokens = golden(name)["tokens"].tolist()
    context = load_encoder(name).context(n_ctx=64, embeddings=True)
    for wanted in ([39], [3, 17, 20]):
        context.memory.clear()
        flags = [i in wanted for i in range(40)]
        assert context.decode(Batch(token=tokens, logits=flags)) == 0
        want = golden(name)["none"][wanted]
        np.testing.assert_allclose(context.embeddings(), want, atol=1e-3 * want.std())


def test_batches_of_one_bucket_share_one_graph(load_encoder):
    context = load_encoder("bert-dense").context(n_ctx=64, n_seq_max=4, embeddings=True)
    for seq_id in ([0] * 9, [0] * 31, [0, 1, 2, 3] * 5, [3, 3, 0, 0, 1]):
        ones = [1] * len(seq_id)
        context.memory.clear()
        assert context.decode(Batch(token=ones, seq_id=seq_id, logits=[True] * len(ones))) == 0
    assert context.perf().n_built == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("jina-bert-v2-dense", {"alibi": 4.0}),
        ("jina-bert-v2-code", {"alibi": 0.0}),
        ("bert-dense", {"activation": "silu"}),
        ("nomic-bert-dense", {"activation": "gelu"}),
        ("nomic-bert-dense", {"rope": "interleaved"}),
        ("bert-dense", {"norm_eps": 1e-2}),
        ("bert-dense", {"attn_scale": 0.125}),
    ],
)
def test_another_model_is_told_apart(load_encoder, name, change):
    lm, ids = load_encoder(name), golden(name)["tokens"].tolist()
    if "rope" in change:
        change = {"rope": replace(lm.model.hp.rope, style=change["rope"])}
    lm.model.hp = replace(lm.model.hp, **change)
    assert error(name, lm.embed(ids, "none", normalize=False), "none") > 3 * TOLERANCE


@pytest.mark.parametrize("name", ["bert-dense", "nomic-bert-dense", "jina-bert-v2-dense"])
def test_quantized_weights_in_both_forms(load_encoder, name):
    ids = golden(name)["tokens"].tolist()
    kinds = {f"{n}.weight": "Q8_0" for n in ("attn_q", "attn_qkv", "attn_output", "ffn_up")}
    exact, fast = (
        load_encoder(name, exact=exact, quantize=kinds).embed(ids, "mean", normalize=False)
        for exact in (True, False)
    )
    assert error(name, exact, "mean") < 20 * TOLERANCE
    np.testing.assert_allclose(fast, exact, atol=20 * TOLERANCE)


def test_a_text_past_the_positions_of_the_model(load_encoder):
    lm = load_encoder("bert-dense", n_ctx=300)
    assert lm.embed([5] * 128, "mean").shape == (64,)
    with pytest.raises(ContextFullError, match="text 0 has 129 tokens, the context holds 128"):
        lm.embed([5] * 129, "mean")


@pytest.mark.parametrize("n_ctx", [1, 5])
def test_small_contexts(load_encoder, n_ctx):
    lm = load_encoder("jina-bert-v2-dense", n_ctx=n_ctx)
    out = lm.embed([[7] * n_ctx] * 3, "mean")
    assert out.shape == (3, 64)
    np.testing.assert_allclose(out[1:], out[:1].repeat(2, 0), atol=1e-5)
