"""The whole forward pass against the same model written in numpy and float64."""

from dataclasses import replace

import gguf
import jax
import numpy as np
import pytest
from gguf.quants import dequantize
from jax.extend.core import jaxprs_in_params
from steps import step_of
from tiny_models import write_tiny

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.gguf import open_gguf
from minfer_jax.models.model import Model
from minfer_jax.models.packing import WeightForm
from minfer_jax.settings import Settings

N_EMBD, N_HEAD, N_KV, D, D_V, N_FF, N_VOCAB = 64, 4, 2, 16, 8, 96, 40
N_ROT = 12
TOKENS = [3, 17, 39, 0, 5, 5, 21, 8, 30, 12, 1]
TOLERANCE = 1e-5  # of the logits' standard deviation
ROUNDING = 5e-6  # the same sums in another order
CAPS = {"attn_softcap": 0.05, "final_softcap": 2.0}


def matrices():
    """Names and shapes [in, out] of a layer's matrices, each with a bias."""
    return {
        "attn_q": [N_EMBD, N_HEAD * D],
        "attn_k": [N_EMBD, N_KV * D],
        "attn_v": [N_EMBD, N_KV * D_V],
        "attn_output": [N_HEAD * D_V, N_EMBD],
        "ffn_gate": [N_EMBD, N_FF],
        "ffn_up": [N_EMBD, N_FF],
        "ffn_down": [N_FF, N_EMBD],
    }


def spec():
    ints = {
        "context_length": 128,
        "embedding_length": N_EMBD,
        "block_count": 2,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_KV,
        "attention.key_length": D,
        "attention.value_length": D_V,
        "rope.dimension_count": N_ROT,
    }
    kv = [["general.architecture", ["STRING"], "llama"]]
    kv += [[f"llama.{key}", ["UINT32"], value] for key, value in ints.items()]
    kv += [["llama.attention.layer_norm_rms_epsilon", ["FLOAT32"], 1e-5]]
    tensors = [
        ["token_embd.weight", [N_EMBD, N_VOCAB], "F32"],
        ["output.weight", [N_EMBD, N_VOCAB], "F32"],
        ["output_norm.weight", [N_EMBD], "F32"],
        ["rope_freqs.weight", [N_ROT // 2], "F32"],
    ]
    for il in range(2):
        for name in ("attn_norm", "ffn_norm"):
            tensors.append([f"blk.{il}.{name}.weight", [N_EMBD], "F32"])
        for name, ne in matrices().items():
            tensors.append([f"blk.{il}.{name}.weight", ne, "F32"])
            tensors.append([f"blk.{il}.{name}.bias", ne[1:], "F32"])
    return {"kv": kv, "tensors": tensors}


VARIANTS = {
    "plain": {},
    "tied": {"drop": ("output.weight",)},
    "mixed": {
        "quantize": {
            "blk.0.attn_v.weight": "Q5_1",
            "blk.1.attn_q.weight": "F16",
            "attn_q.weight": "Q8_0",
            "attn_k.weight": "Q8_0",
            "attn_v.weight": "Q8_0",
            "ffn_gate.weight": "Q4_0",
            "blk.0.ffn_up.weight": "Q4_0",
            "blk.1.ffn_up.weight": "BF16",
            "token_embd.weight": "Q4_1",
        }
    },
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return Settings(home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forward")
    return {
        name: open_gguf(write_tiny(spec(), folder / f"{name}.gguf", **options))
        for name, options in VARIANTS.items()
    }


@pytest.fixture(scope="module")
def models(files, settings):
    device = jax.devices("cpu")[0]
    return {
        name: Model(file, device=device, form=WeightForm.PLANES, settings=settings)
        for name, file in files.items()
    }


def run(model, settings, batches, **options):
    """Logits of every batch: a list of float32 [n, n_vocab]."""
    context = Context(model, n_ctx=64, exact=True, settings=settings, **options)
    out = []
    for batch in batches:
        assert context.decode(batch) == 0
        out.append(context.all_logits())
    return out


def everything(tokens):
    return Batch(token=tokens, logits=[True] * len(tokens))


def assert_close(logits, expected, tolerance):
    assert logits.shape == expected.shape and logits.dtype == np.float32
    assert np.abs(logits - expected).max() < tolerance * expected.std()


class Reference:
    """The mathematics of `spec()` in float64, one row and one head at a time."""

    def __init__(self, file, hp):
        self.file, self.hp = file, hp

    def tensor(self, name):
        info = self.file.tensors[name]
        raw = self.file.raw(name).reshape(info.shape[0] if len(info.shape) > 1 else 1, -1)
        values = dequantize(raw, gguf.GGMLQuantizationType(info.type_id))
        return values.astype(np.float64).reshape(info.shape)

    def project(self, x, name):
        return x @ self.tensor(f"{name}.weight").T + self.tensor(f"{name}.bias")

    def norm(self, x, name):
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.hp.norm_eps)
        return x * self.tensor(f"{name}.weight")

    def rotate(self, x, base):
        freq = base ** (-np.arange(0, N_ROT, 2) / N_ROT) / self.tensor("rope_freqs.weight")
        turn = np.exp(1j * np.arange(len(x))[:, None] * freq)[:, None, :]
        z = (x[..., 0:N_ROT:2] + 1j * x[..., 1:N_ROT:2]) * turn
        out = x.copy()
        out[..., 0:N_ROT:2], out[..., 1:N_ROT:2] = z.real, z.imag
        return out

    def attention(self, il, x):
        hp, n = self.hp, len(x)
        local = bool(hp.swa_layers and hp.swa_layers[il])
        base = hp.rope_swa.freq_base if local else hp.rope.freq_base
        q = self.rotate(self.project(x, f"blk.{il}.attn_q").reshape(n, N_HEAD, D), base)
        k = self.rotate(self.project(x, f"blk.{il}.attn_k").reshape(n, N_KV, D), base)
        v = self.project(x, f"blk.{il}.attn_v").reshape(n, N_KV, D_V)
        out = np.zeros((n, N_HEAD, D_V))
        for i in range(n):
            first = max(0, i - hp.n_swa + 1) if local else 0
            for h in range(N_HEAD):
                kv = h * N_KV // N_HEAD
                scores = k[first : i + 1, kv] @ q[i, h] * hp.attn_scale
                if hp.attn_softcap:
                    scores = hp.attn_softcap * np.tanh(scores / hp.attn_softcap)
                p = np.exp(scores)
                out[i, h] = p / p.sum() @ v[first : i + 1, kv]
        return self.project(out.reshape(n, -1), f"blk.{il}.attn_output")

    def feed_forward(self, il, x):
        gate = self.project(x, f"blk.{il}.ffn_gate")
        if self.hp.activation == "gelu":
            inner = np.sqrt(2.0 / np.pi) * (gate + 0.044715 * gate**3)
            gate = 0.5 * gate * (1.0 + np.tanh(inner))
        else:
            gate = gate / (1.0 + np.exp(-gate))
        return self.project(gate * self.project(x, f"blk.{il}.ffn_up"), f"blk.{il}.ffn_down")

    def logits(self, tokens):
        hp = self.hp
        x = self.tensor("token_embd.weight")[tokens] * hp.embd_scale
        for il in range(2):
            x = x + self.attention(il, self.norm(x, f"blk.{il}.attn_norm"))
            x = x + self.feed_forward(il, self.norm(x, f"blk.{il}.ffn_norm"))
        head = "output" if "output.weight" in self.file.tensors else "token_embd"
        logits = self.norm(x, "output_norm") @ self.tensor(f"{head}.weight").T
        cap = hp.final_softcap
        return cap * np.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_row(models, files, settings, variant):
    model = models[variant]
    expected = Reference(files[variant], model.hp).logits(TOKENS)
    # Eight rows, then three and five rows of padding.
    (logits,) = run(model, settings, [everything(TOKENS)], n_ubatch=8)
    assert_close(logits, expected, TOLERANCE)


def changed(files, settings, **changes):
    """The plain model with other hyperparameters, and its logits in numpy."""
    model = Model(
        files["plain"], device=jax.devices("cpu")[0], form=WeightForm.PLANES, settings=settings
    )
    model.hp = replace(model.hp, **changes)
    return model, Reference(files["plain"], model.hp).logits(TOKENS)


@pytest.mark.parametrize("flash_attn", [True, False], ids=["blocked", "masked"])
@pytest.mark.parametrize("cap", CAPS)
def test_softcaps(models, files, settings, cap, flash_attn):
    model, expected = changed(files, settings, **{cap: CAPS[cap]})
    plain = Reference(files["plain"], models["plain"].hp).logits(TOKENS)
    assert np.abs(expected - plain).max() > 0.01 * plain.std()
    (logits,) = run(model, settings, [everything(TOKENS)], flash_attn=flash_attn)
    assert_close(logits, expected, TOLERANCE)


def test_windows_scales_and_activation(models, files, settings):
    rope = models["plain"].hp.rope
    changes = {
        "n_swa": 3,
        "swa_layers": (True, False),
        "rope_swa": replace(rope, freq_base=100.0),
        "embd_scale": 8.0,
        "attn_scale": 0.5,
        "activation": "gelu",
    }
    model, expected = changed(files, settings, **changes)
    neutral = {
        "n_swa": 64,
        "rope_swa": rope,
        "embd_scale": 1.0,
        "attn_scale": D**-0.5,
        "activation": "silu",
    }
    for key, value in neutral.items():  # each of the changes matters
        other = replace(model.hp, **{key: value})
        without = Reference(files["plain"], other).logits(TOKENS)
        assert np.abs(expected - without).max() > 1e-3 * expected.std(), key
    logits = run(model, settings, [everything(TOKENS[:8]), everything(TOKENS[8:])], n_ubatch=8)
    assert_close(np.concatenate(logits), expected, TOLERANCE)


@pytest.mark.parametrize("variant", ["plain", "mixed"])
def test_fused_and_separate_products_give_the_same_logits(models, settings, variant):
    batches = [everything(TOKENS), Batch(token=[7])]
    fused = run(models[variant], settings, batches)
    separate = replace(settings, fuse_qkv=False, fuse_ffn=False)
    for logits, expected in zip(run(models[variant], separate, batches), fused, strict=True):
        assert_close(logits, expected, ROUNDING)


def product_rows(model, *, n_tokens=8, n_out=8, **cparams):
    """Rows of every product with a weight in a graph, in order."""
    make_step, params, args = step_of(model, n_tokens, n_out=n_out, **cparams)
    shapes = products(jax.make_jaxpr(make_step(), static_argnums=0)(params, *args))
    return [shape[0] for shape in shapes if len(shape) == 2]


def products(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.outvars[0].aval.shape
        for inner in jaxprs_in_params(eqn.params):
            yield from products(inner)


@pytest.mark.parametrize(
    ("variant", "flags", "n"),
    [
        # Of two layers: QKV, attention output, gate and up, down; then the head.
        ("plain", {}, 2 * (1 + 1 + 1 + 1) + 1),
        ("plain", {"fuse_qkv": False}, 2 * (3 + 1 + 1 + 1) + 1),
        ("plain", {"fuse_ffn": False}, 2 * (1 + 1 + 2 + 1) + 1),
        ("plain", {"fuse_qkv": False, "fuse_ffn": False}, 2 * (3 + 1 + 2 + 1) + 1),
        # First layer: Q and K are of one type, gate and up too. Second: K and V.
        ("mixed", {}, (2 + 1 + 1 + 1) + (2 + 1 + 2 + 1) + 1),
        ("mixed", {"fuse_qkv": False, "fuse_ffn": False}, 2 * (3 + 1 + 2 + 1) + 1),
    ],
)
def test_number_of_products(models, variant, flags, n):
    assert len(product_rows(models[variant], **flags)) == n


def test_only_wanted_rows_reach_the_last_ffn_and_the_head(models):
    assert product_rows(models["plain"], n_out=8) == [8] * 9
    # The last layer's gate and up, its down, and the head.
    assert product_rows(models["plain"], n_out=1) == [8] * 6 + [1] * 3


@pytest.mark.parametrize("row", [0, 4, 10])
def test_any_single_row_may_be_the_wanted_one(models, files, settings, row):
    expected = Reference(files["plain"], models["plain"].hp).logits(TOKENS)
    wanted = [i == row for i in range(len(TOKENS))]
    (logits,) = run(models["plain"], settings, [Batch(token=TOKENS, logits=wanted)])
    assert_close(logits[0], expected[row], TOLERANCE)


def test_one_wanted_row_has_the_logits_it_has_among_all(models, settings):
    (every,) = run(models["plain"], settings, [everything(TOKENS)])
    (last,) = run(models["plain"], settings, [Batch(token=TOKENS)])
    assert last.shape == (1, N_VOCAB)
    assert_close(last[0], every[-1], ROUNDING)
