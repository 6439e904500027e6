"""Faults that users of such engines met with caches and decoding (FIELD-REPORTS, K01 to K14)."""

from itertools import pairwise
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from dense_llama import DenseLlama, write_one_layer

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.errors import ContextFullError, UsageError
from minfer_jax.generate import Generation, generate
from minfer_jax.lm import LanguageModel, load
from minfer_jax.ops.kv_types import KV_TYPES
from minfer_jax.sampling import Sampler, SamplingParams
from minfer_jax.settings import Settings

TOKENS = np.random.default_rng(21).integers(0, 128, 200).tolist()
DENSE = DenseLlama()
ERRORS = {"f32": 1e-4, "f16": 0.003, "bf16": 0.03, "q8_0": 0.06, "q4_0": 1.0}
"""What logits lose by K or V of a type, at most, in standard deviations of these wide logits."""
TOKENIZER = SimpleNamespace(eog=frozenset(), piece=lambda token, special: f"<{token}>".encode())


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-layer")
    path = write_one_layer(folder / "model.gguf")
    loaded = {}

    def lm(**options) -> LanguageModel:
        key = tuple(sorted(options.items()))
        if key not in loaded:
            loaded[key] = load(
                path, n_ctx=64, exact=True, settings=Settings(home=folder), **options
            )
        return loaded[key]

    return lm


def close(got, want, limit=1e-4):
    return np.abs(got - want).max() < limit * want.std()


def decode(context: Context, tokens: list[int], seq: int = 0) -> np.ndarray:
    """The last logits after these tokens, in batches that are allowed."""
    for start in range(0, len(tokens), context.n_batch):
        part = tokens[start : start + context.n_batch]
        assert context.decode(Batch(token=part, seq_id=[seq] * len(part))) == 0
    return context.logits()


# --- K01, K03: shifts ---------------------------------------------------------------------------


def test_k01_two_shifts_before_one_update_add_up(one_layer):
    """Two, then one token removed from the front: keys turn by -3, once."""
    context = one_layer().context(n_ctx=64)
    decode(context, TOKENS[:8])
    memory = context.memory
    assert memory.seq_rm(0, 0, 2) and memory.seq_add(0, 2, 8, -2)
    assert memory.seq_rm(0, 0, 1) and memory.seq_add(0, 1, 6, -1)
    assert (memory.seq_pos_min(0), memory.seq_pos_max(0)) == (0, 4)
    shifts = context.store.caches[0].shifts()
    assert shifts[:8].tolist() == [0, 0, 0, -3, -3, -3, -3, -3] and not shifts[8:].any()
    twice = decode(context, [9])
    assert not context.store.shifted
    held = [*enumerate(TOKENS[3:8]), (5, 9)]
    assert close(twice, DENSE.logits(held))

    once = one_layer().context(n_ctx=64)
    decode(once, TOKENS[:8])
    assert once.memory.seq_rm(0, 0, 3) and once.memory.seq_add(0, 3, 8, -3)
    assert close(decode(once, [9]), twice, 1e-5)


def stored(kind: str, x: np.ndarray) -> np.ndarray:
    """What is read back of values of a type."""
    form = KV_TYPES[kind]
    return np.asarray(form.decode(form.encode(jnp.asarray(x, jnp.float32))), np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KV_TYPES)
def test_k03_a_context_that_shifts_with_keys_of_every_type(one_layer, kind):
    """50 tokens in 10 places: whenever these are full, four behind the first token are dropped.

    The judge reads keys back, turns them and stores them again, as the cache has to.
    """
    context = one_layer().context(n_ctx=10, kv_types=(kind, "f16"))
    k = v = np.zeros((0, 2, 32))
    for i, token in enumerate(TOKENS[:50]):
        if len(k) == 10:
            assert context.memory.seq_rm(0, 1, 5) and context.memory.seq_add(0, 5, -1, -4)
            moved = stored(kind, DENSE.turned(k[5:], np.full(5, -4.0)))
            k, v = np.concatenate([k[:1], moved]), np.concatenate([v[:1], v[5:]])
        new = DENSE.keys_values([(len(k), token)])
        k = np.concatenate([k, stored(kind, new[0])])
        v = np.concatenate([v, stored("f16", new[1])])
        assert context.memory.n_past() == len(k) - 1
        # A value between two steps of a quantized type may be rounded the other way.
        limit = 1e-3 if kind in ("f32", "f16") else 0.02
        assert close(decode(context, [token]), DENSE.answer((len(k) - 1, token), k, v), limit), i


# --- K04: types ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("flash_attn", [True, False])
def test_k04_every_pair_of_types_with_and_without_flash_attention(one_layer, flash_attn):
    lm = one_layer(flash_attn=flash_attn)
    held = list(enumerate(TOKENS[:24]))
    want = DENSE.logits(held)
    keys, values = DENSE.keys_values(held)
    errors = {}
    for k in KV_TYPES:
        for v in KV_TYPES:
            context = lm.context(n_ctx=64, kv_types=(k, v))
            got = decode(context, TOKENS[:24])
            assert close(got, DENSE.answer(held[-1], stored(k, keys), stored(v, values)), 5e-3)
            errors[k, v] = np.abs(got - want).max() / want.std()
            assert errors[k, v] < ERRORS[k] + ERRORS[v], (k, v)
    assert errors["q4_0", "f32"] > errors["q8_0", "f32"] > errors["f16", "f32"]
    assert errors["f32", "q4_0"] > errors["f32", "q8_0"] > errors["f32", "f16"]


def test_k04_heads_that_no_whole_block_fits_are_refused_at_the_start(tmp_path):
    from tiny_models import read_spec, write_tiny

    heads = {"llama.attention.key_length": 16, "llama.attention.value_length": 16}
    heads |= {"llama.rope.dimension_count": 16}
    heads |= {"llama.attention.head_count": 16, "llama.attention.head_count_kv": 4}
    path = write_tiny(
        read_spec("llama-gqa-dense"), tmp_path / "m.gguf", kv=heads, drop=("rope_freqs.weight",)
    )
    lm = load(path, n_ctx=64, exact=True, settings=Settings(home=tmp_path))
    for types, name in ((("q8_0", "f16"), "K"), (("f16", "q4_0"), "V")):
        with pytest.raises(UsageError, match=f"{name} of type q.* of 32 values; .* have 16: use"):
            lm.context(n_ctx=64, kv_types=types)
    with pytest.raises(UsageError, match="K of type 'q5_0' is not supported; supported: f32, f16"):
        lm.context(n_ctx=64, kv_types=("q5_0", "f16"))


# --- K08: a prompt again ------------------------------------------------------------------------


def continue_with(context: Context, prompt: list[int], held: list[int]) -> tuple[np.ndarray, int]:
    """Keep what a prompt has in common with what is held, but for its last token: its logits, and
    how many tokens that took."""
    same = [a == b for a, b in zip(prompt, held, strict=False)]
    keep = min(same.index(False) if False in same else len(same), len(prompt) - 1)
    assert context.memory.seq_rm(0, keep)
    return decode(context, prompt[keep:]), len(prompt) - keep


def test_k08_the_same_prompt_twice(load_tiny):
    lm = load_tiny("llama-gqa-dense")
    context = lm.context(n_ctx=64)
    prompt = TOKENS[:12]
    first = decode(context, prompt)
    want = lm.logits([*prompt, TOKENS[50]])
    for next_prompt, evaluated in (
        (prompt, 1),
        (prompt[:-1], 1),
        ([*prompt, TOKENS[50]], 2),
        (prompt, 1),
    ):
        held = context.history.tokens(0)
        assert held is not None
        before = context.perf().n_eval + context.perf().n_p_eval
        logits, n = continue_with(context, next_prompt, held)
        assert n == evaluated == context.perf().n_eval + context.perf().n_p_eval - before
        assert context.memory.n_past() == len(next_prompt)
        assert close(logits, want[len(next_prompt) - 1])
    assert close(logits, first) and int(logits.argmax()) == int(first.argmax())
    # Nothing left to evaluate is nothing to ask logits of.
    context.memory.seq_rm(0, len(prompt))
    assert close(context.logits(), first)


# --- K09, K10: cutting --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa-dense", "mamba-dense"])
def test_k09_how_a_prompt_is_cut_changes_nothing(load_tiny, name):
    lm = load_tiny(name)
    want = lm.logits(TOKENS[:33])
    for n_batch in (1, 2, 7, 32, 33, 512):
        for n_ubatch in (1, 7, 33) if n_batch >= 32 else (n_batch,):
            context = lm.context(n_ctx=64, n_batch=n_batch, n_ubatch=n_ubatch)
            rows = []
            for start in range(0, 33, n_batch):
                part = TOKENS[:33][start : start + n_batch]
                assert context.decode(Batch(token=part, logits=[True] * len(part))) == 0
                rows.append(context.all_logits())
            got = np.concatenate(rows)
            assert close(got, want), (n_batch, n_ubatch)
            assert (got.argmax(1) == want.argmax(1)).all()


@pytest.mark.parametrize("n_predict", [1, 5])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17])
def test_k10_prompts_longer_than_a_batch_and_as_long_as_the_context(one_layer, n, n_predict):
    context = one_layer().context(n_ctx=16, n_batch=8)
    out = Generation()
    sampler = Sampler(SamplingParams(temp=0.0), [])
    if n >= 16:
        with pytest.raises(ContextFullError, match=rf"has {n} tokens .* room for 15 .*n_ctx is 16"):
            generate(context, TOKENIZER, TOKENS[:n], sampler, n_predict=n_predict, into=out)
        assert context.memory.n_past() == 0 and context.perf().n_p_eval == 0
        return
    list(generate(context, TOKENIZER, TOKENS[:n], sampler, n_predict=n_predict, into=out))
    # A token that is sampled last needs no place, so that of a prompt of 15 there are two.
    assert len(out.ids) == min(n_predict, 16 - n + 1)
    assert out.finish_reason == "length" and out.stats.n_prompt == n
    held = list(enumerate([*TOKENS[:n], *out.ids]))
    for i, token in enumerate(out.ids):
        assert int(DENSE.logits(held[: n + i]).argmax()) == token


# --- K12: ids that are appended -----------------------------------------------------------------


def test_k12_ids_that_were_generated_are_kept_and_later_turns_appended(one_layer):
    """A context never sees text: whatever ids a turn ended with, the next continues them."""
    context = one_layer().context(n_ctx=64)
    ids: list[int] = []
    ends = [0]
    for turn in range(3):
        out = Generation()
        prompt = TOKENS[20 * turn : 20 * turn + 5]
        sampler = Sampler(SamplingParams(temp=1.5, seed=turn), [])
        list(generate(context, TOKENIZER, prompt, sampler, n_predict=4, into=out))
        n_past = context.memory.n_past()
        decode(context, out.ids[n_past - len(ids) - 5 :])  # the last one, which needed no place
        ids += [*prompt, *out.ids]
        ends.append(context.memory.n_past())
        assert ends[-1] == len(ids) == ends[-2] + 9
        assert close(context.logits(), one_layer().logits(ids)[-1])
    assert all(b - a == 9 for a, b in pairwise(ends)) and context.history.tokens(0) == ids


# --- K14: sequences -----------------------------------------------------------------------------


@pytest.mark.parametrize("kv_unified", [True, False])
def test_k14_every_sequence_and_cells_that_are_shared(one_layer, kv_unified):
    context = one_layer().context(n_ctx=64, n_seq_max=2, kv_unified=kv_unified)
    decode(context, TOKENS[:8])
    memory = context.memory

    def held():
        return [sorted(context.store.caches[0].positions(s).tolist()) for s in range(2)]

    assert memory.seq_cp(0, 1, 0, 4)
    assert memory.seq_rm(0, 2, -1) and held() == [[0, 1], [0, 1, 2, 3]]
    assert close(decode(context, [7], seq=1), DENSE.logits([*enumerate(TOKENS[:4]), (4, 7)]))
    assert memory.seq_rm(1, 4, -1)
    # Odd ranges are empty, and negative ends are the beginning and the end.
    for p0, p1 in ((3, 2), (2, 2), (9, 12), (7, -1), (9, 3), (4, -1), (0, 0), (-3, 0)):
        assert memory.seq_rm(1, p0, p1) and held() == [[0, 1], [0, 1, 2, 3]], (p0, p1)
    assert memory.seq_rm(1, 1, 3) and held() == [[0, 1], [0, 3]]
    assert memory.seq_rm(1, -5, 1) and held() == [[0, 1], [3]]
    assert memory.seq_rm(-1, 1, 2) and held() == [[0], [3]]
    assert close(decode(context, [5], seq=1), DENSE.logits([(3, TOKENS[3]), (4, 5)]))
    assert memory.seq_rm(-1, 0, -1) and held() == [[], []]
    assert memory.lengths == (0, 0)
    for seq in (-2, 2):
        with pytest.raises(UsageError, match="the sequence is"):
            memory.seq_rm(seq)
    for seq in (-1, 2):
        with pytest.raises(UsageError, match="the sequence is"):
            memory.seq_cp(0, seq)
