"""DeepSeek V2 and V3 with several heads and groups of experts, against numpy: nothing absorbed, no
cache, every expert by itself. The golden has one head and uses all of its experts.
"""

import math
from dataclasses import dataclass, field

import jax
import numpy as np
import pytest
from steps import step_of
from tiny_models import tensor_values, write_tiny

from minfer_jax.batch import Batch
from minfer_jax.errors import ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.lm import load
from minfer_jax.models import deepseek2
from minfer_jax.models.hparams import MLAParams
from minfer_jax.ops.cpu.library import target
from minfer_jax.settings import Settings

N_EMBD, N_HEAD, N_VOCAB, N_LAYER = 64, 3, 40, 3
NOPE, N_ROT, V, RANK, Q_RANK = 24, 8, 16, 48, 40
N_FF, N_EXPERT, N_USED, WIDTH, N_SHARED = 96, 8, 3, 32, 2
TOKENS = [3, 17, 39, 0, 5, 5, 21, 8, 30, 12, 1, 22]
TOLERANCE = 1e-4  # of the logits' standard deviation
ROUGH = 0.02  # the same where activations, keys and values are rounded


@dataclass(frozen=True)
class Kind:
    """What differs between files of the architecture."""

    lite: bool = False
    """Queries are not compressed."""
    unfolded: bool = False
    """One tensor for keys and values, as older files have it."""
    joined: bool = False
    """The experts' gate and up are one tensor."""
    bias: bool = True
    n_dense: int = 1
    kv: dict[str, object] = field(default_factory=dict)


V3 = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
V2 = {"expert_gating_func": 1, "expert_weights_norm": False, "expert_weights_scale": 4.0}
GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 16,
}
KINDS = {
    "v3": Kind(kv={**V3, **GROUPS}),
    "v3-joined": Kind(joined=True, kv={**V3, **GROUPS}),
    "v2-lite": Kind(lite=True, bias=False, kv=V2),
    "v2-unfolded": Kind(unfolded=True, bias=False, kv=V2),
    "dense": Kind(bias=False, n_dense=N_LAYER, kv={"expert_count": 0}),
    "all-experts": Kind(bias=False, n_dense=0, kv=V3),
    "yarn": Kind(kv={**V3, **YARN, "rope.scaling.yarn_log_multiplier": 0.0707}),
    "yarn-unfolded": Kind(unfolded=True, kv={**V3, **YARN}),
}


def tensor_shapes(kind):
    """Names without .weight, and shapes as numpy has them."""
    heads = N_HEAD * (NOPE + N_ROT)
    shapes = {
        "token_embd": (N_VOCAB, N_EMBD),
        "output": (N_VOCAB, N_EMBD),
        "output_norm": (N_EMBD,),
    }
    for il in range(N_LAYER):
        own = {
            "attn_norm": (N_EMBD,),
            "ffn_norm": (N_EMBD,),
            "attn_kv_a_mqa": (RANK + N_ROT, N_EMBD),
            "attn_kv_a_norm": (RANK,),
            "attn_output": (N_EMBD, N_HEAD * V),
        }
        if kind.lite:
            own["attn_q"] = (heads, N_EMBD)
        else:
            own |= {"attn_q_a": (Q_RANK, N_EMBD), "attn_q_a_norm": (Q_RANK,)}
            own["attn_q_b"] = (heads, Q_RANK)
        if kind.unfolded:
            own["attn_kv_b"] = (N_HEAD * (NOPE + V), RANK)
        else:
            own |= {"attn_k_b": (N_HEAD, RANK, NOPE), "attn_v_b": (N_HEAD, V, RANK)}
        if il < kind.n_dense:
            own |= {f"ffn_{name}": (N_FF, N_EMBD) for name in ("gate", "up")}
            own["ffn_down"] = (N_EMBD, N_FF)
        else:
            own |= expert_shapes(kind)
        shapes |= {f"blk.{il}.{name}": shape for name, shape in own.items()}
    return shapes


def expert_shapes(kind):
    up, shared = (N_EXPERT, WIDTH, N_EMBD), N_SHARED * WIDTH
    shapes = {"ffn_gate_inp": (N_EXPERT, N_EMBD), "ffn_down_exps": (N_EXPERT, N_EMBD, WIDTH)}
    if kind.joined:
        shapes["ffn_gate_up_exps"] = (N_EXPERT, 2 * WIDTH, N_EMBD)
    else:
        shapes |= {"ffn_gate_exps": up, "ffn_up_exps": up}
    shapes |= {"ffn_gate_shexp": (shared, N_EMBD), "ffn_up_shexp": (shared, N_EMBD)}
    return shapes | {"ffn_down_shexp": (N_EMBD, shared)}


def spec(kind):
    values = {
        "context_length": 256,
        "embedding_length": N_EMBD,
        "block_count": N_LAYER,
        "feed_forward_length": N_FF,
        "leading_dense_block_count": kind.n_dense,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD if kind.unfolded else 1,
        "attention.kv_lora_rank": RANK,
        "attention.q_lora_rank": Q_RANK,
        "attention.key_length": NOPE + N_ROT if kind.unfolded else RANK + N_ROT,
        "attention.value_length": V if kind.unfolded else RANK,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": N_ROT,
        "expert_count": N_EXPERT,
        "expert_used_count": N_USED,
        "expert_shared_count": N_SHARED,
        "expert_feed_forward_length": WIDTH,
        **kind.kv,
    }
    if not kind.unfolded:
        values["attention.key_length_mla"] = NOPE + N_ROT
        values["attention.value_length_mla"] = V
    types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    kv = [["general.architecture", ["STRING"], "deepseek2"]]
    kv += [[f"deepseek2.{key}", [types[type(v)]], v] for key, v in values.items()]
    tensors = [[f"{n}.weight", list(s[::-1]), "F32"] for n, s in tensor_shapes(kind).items()]
    if kind.bias:
        layers = range(kind.n_dense, N_LAYER)
        tensors += [[f"blk.{il}.exp_probs_b.bias", [N_EXPERT], "F32"] for il in layers]
    return {"kv": kv, "tensors": tensors}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek2")
    return lambda name, **options: write_tiny(spec(KINDS[name]), folder / f"{name}.gguf", **options)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return Settings(home=tmp_path_factory.mktemp("home"))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class Reference:
    """The mathematics in float64, a token, a head and an expert at a time."""

    def __init__(self, kind):
        self.kind = kind
        self.kv = kind.kv

    def tensor(self, name):
        shape = tensor_shapes(self.kind)[name]
        return tensor_values(f"{name}.weight", math.prod(shape)).reshape(shape).astype(np.float64)

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * self.tensor(name)

    def yarn(self):
        """Frequencies, their magnitude, and the factor on the scores."""
        freq = 10000.0 ** (-np.arange(0, N_ROT, 2) / N_ROT)
        if "rope.scaling.factor" not in self.kv:
            return freq, 1.0, 1.0
        factor, turns = self.kv["rope.scaling.factor"], lambda b: 16 / (b * 2 * math.pi)
        low, high = (
            N_ROT * math.log(turns(beta)) / (2 * math.log(10000.0)) for beta in (32.0, 1.0)
        )
        low, high = max(0.0, math.floor(low)), min(N_ROT - 1.0, math.ceil(high))
        kept = 1 - np.clip((np.arange(N_ROT // 2) - low) / max(0.001, high - low), 0, 1)
        freq = freq / factor * (1 - kept) + freq * kept
        temperature = 0.1 * math.log(factor) + 1
        log_mul = 10 * self.kv.get("rope.scaling.yarn_log_multiplier", 0.0)
        if log_mul:
            return freq, 1.0, (0.1 * log_mul * math.log(factor) + 1) ** 2
        return freq, temperature, temperature**2

    def rotate(self, x):
        """Pairs of neighbours of x [n, ..., N_ROT]."""
        freq, magnitude, _ = self.yarn()
        turn = magnitude * np.exp(1j * np.arange(len(x))[:, None] * freq)
        turn = turn.reshape(len(x), *(1,) * (x.ndim - 2), -1)
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)

    def keys_and_values(self, blk, latent, h):
        """[n, NOPE] and [n, V] of head h."""
        if self.kind.unfolded:
            w = self.tensor(f"{blk}.attn_kv_b").reshape(N_HEAD, NOPE + V, RANK)[h]
            return latent @ w[:NOPE].T, latent @ w[NOPE:].T
        k, v = self.tensor(f"{blk}.attn_k_b")[h], self.tensor(f"{blk}.attn_v_b")[h]
        return latent @ k, latent @ v.T

    def attention(self, blk, x):
        n = len(x)
        if self.kind.lite:
            q = x @ self.tensor(f"{blk}.attn_q").T
        else:
            q = self.norm(x @ self.tensor(f"{blk}.attn_q_a").T, f"{blk}.attn_q_a_norm")
            q = q @ self.tensor(f"{blk}.attn_q_b").T
        q = q.reshape(n, N_HEAD, NOPE + N_ROT)
        joint = x @ self.tensor(f"{blk}.attn_kv_a_mqa").T
        latent = self.norm(joint[:, :RANK], f"{blk}.attn_kv_a_norm")
        k_rot, q_rot = self.rotate(joint[:, RANK:]), self.rotate(q[..., NOPE:])
        out = np.zeros((n, N_HEAD, V))
        for h in range(N_HEAD):
            k, v = self.keys_and_values(blk, latent, h)
            for i in range(n):
                scores = k[: i + 1] @ q[i, h, :NOPE] + k_rot[: i + 1] @ q_rot[i, h]
                p = np.exp(scores * self.yarn()[2] / math.sqrt(NOPE + N_ROT))
                out[i, h] = p / p.sum() @ v[: i + 1]
        return out.reshape(n, -1) @ self.tensor(f"{blk}.attn_output").T

    def gated(self, x, gate, up, down):
        g = gate @ x
        return down @ (g * sigmoid(g) * (up @ x))

    def choice(self, blk, x):
        """Experts of one token and their weights."""
        logits = self.tensor(f"{blk}.ffn_gate_inp") @ x
        probs = sigmoid(logits)
        if self.kv["expert_gating_func"] == 1:
            probs = np.exp(logits) / np.exp(logits).sum()
        scores = probs.copy()
        if self.kind.bias:
            scores += tensor_values(f"{blk}.exp_probs_b.bias", N_EXPERT)
        if "expert_group_count" in self.kv:
            groups = scores.reshape(4, 2)
            best = np.argsort(-groups.sum(axis=1))[:2]
            outside = np.setdiff1d(np.arange(4), best)
            groups[outside] = -np.inf
        ids = np.argsort(-scores)[:N_USED]
        weights = probs[ids]
        if self.kv["expert_weights_norm"]:
            weights = weights / weights.sum()
        return ids, weights * self.kv["expert_weights_scale"]

    def experts(self, blk, x):
        if self.kind.joined:
            joined = self.tensor(f"{blk}.ffn_gate_up_exps")
            gate, up = joined[:, :WIDTH], joined[:, WIDTH:]
        else:
            gate, up = (self.tensor(f"{blk}.ffn_{name}_exps") for name in ("gate", "up"))
        down = self.tensor(f"{blk}.ffn_down_exps")
        out = np.zeros_like(x)
        for i, row in enumerate(x):
            for e, weight in zip(*self.choice(blk, row), strict=True):
                out[i] += weight * self.gated(row, gate[e], up[e], down[e])
        return out

    def feed_forward(self, blk, x, end):
        parts = [self.tensor(f"{blk}.ffn_{name}{end}") for name in ("gate", "up", "down")]
        return np.stack([self.gated(row, *parts) for row in x])

    def logits(self, tokens):
        x = self.tensor("token_embd")[tokens]
        for il in range(N_LAYER):
            blk = f"blk.{il}"
            x = x + self.attention(blk, self.norm(x, f"{blk}.attn_norm"))
            normed = self.norm(x, f"{blk}.ffn_norm")
            if il < self.kind.n_dense:
                x = x + self.feed_forward(blk, normed, "")
            else:
                x = x + self.experts(blk, normed) + self.feed_forward(blk, normed, "_shexp")
        return self.norm(x, "output_norm") @ self.tensor("output").T


def assert_close(logits, expected, tolerance):
    assert logits.shape == expected.shape and logits.dtype == np.float32
    assert np.abs(logits - expected).max() < tolerance * expected.std()


@pytest.mark.parametrize("name", KINDS)
def test_logits(path_of, settings, name):
    lm = load(path_of(name), n_ctx=64, exact=True, settings=settings)
    assert_close(lm.logits(TOKENS), Reference(KINDS[name]).logits(TOKENS), TOLERANCE)


@pytest.mark.parametrize("name", ["v3", "v3-joined", "v2-unfolded", "yarn-unfolded", "dense"])
def test_logits_of_native_kernels(native_library, path_of, settings, name):
    lm = load(path_of(name), n_ctx=64, settings=settings)
    assert_close(lm.logits(TOKENS), Reference(KINDS[name]).logits(TOKENS), ROUGH)


@pytest.mark.parametrize(("name", "n"), [("v2-unfolded", N_LAYER), ("v3", 0)])
def test_attention_of_unfolded_heads_is_one_kernel(native_library, path_of, settings, name, n):
    lm = load(path_of(name), n_ctx=64, settings=settings)
    make_step, params, args = step_of(lm.model, 1)
    step = jax.make_jaxpr(make_step(), static_argnums=0)(params, *args)
    assert str(step).count(f"target_name={target('attend')}") == n


@pytest.mark.parametrize("exact", [True, False])
def test_token_by_token_beside_another_sequence(path_of, settings, exact):
    """Decode steps with padding, whose experts nobody reads."""
    lm = load(path_of("v3"), n_ctx=64, exact=exact, settings=settings)
    context = lm.context(n_ctx=64, n_seq_max=2)
    rows = [[], []]
    for i in range(len(TOKENS)):
        tokens = [TOKENS[i], TOKENS[-1 - i]]
        assert context.decode(Batch(token=tokens, seq_id=[0, 1], logits=[True, True])) == 0
        for seq, row in enumerate(context.all_logits()):
            rows[seq].append(row)
    for seq, order in enumerate((TOKENS, TOKENS[::-1])):
        expected = Reference(KINDS["v3"]).logits(order)
        assert_close(np.stack(rows[seq]), expected, TOLERANCE if exact else ROUGH)


def test_what_the_kinds_differ_in_matters():
    """Or the tests above would not see it."""
    logits = {name: Reference(kind).logits(TOKENS) for name, kind in KINDS.items()}
    plain = Reference(Kind(kv=V3)).logits(TOKENS)
    without_bias = Reference(Kind(bias=False, kv={**V3, **GROUPS})).logits(TOKENS)
    unscaled = Reference(Kind(kv={**V3, **YARN, "rope.scaling.yarn_log_multiplier": 0.1}))
    pairs = {
        "groups": (logits["v3"], plain),
        "bias": (logits["v3"], without_bias),
        "yarn": (logits["yarn"], plain),
        "multiplier": (logits["yarn"], unscaled.logits(TOKENS)),
    }
    for what, (a, b) in pairs.items():
        assert np.abs(a - b).max() > 20 * TOLERANCE * a.std(), what


# Hyperparameters.


def read(path_of, name="v3", **options):
    return deepseek2.hparams(open_gguf(path_of(name, **options)))


def test_the_cache_of_a_folded_file_is_one_latent_vector_and_the_rotated_part(path_of):
    hp = read(path_of)
    assert (hp.n_head_kv, hp.head_dim_k, hp.head_dim_v) == (1, RANK + N_ROT, RANK)
    assert hp.mla == MLAParams(
        q_lora_rank=Q_RANK, kv_lora_rank=RANK, head_dim_k=NOPE + N_ROT, head_dim_v=V
    )
    assert hp.attn_scale == pytest.approx((NOPE + N_ROT) ** -0.5)


def test_the_cache_of_an_unfolded_file_is_that_of_all_heads(path_of):
    hp = read(path_of, "v2-unfolded")
    assert (hp.n_head_kv, hp.head_dim_k, hp.head_dim_v) == (N_HEAD, NOPE + N_ROT, V)


def test_yarns_temperature_is_on_the_whole_head_if_the_file_has_a_multiplier(path_of):
    """As llama.cpp computes it for DeepSeek-V2-Lite: mscale = mscale_all_dim = 0.707, factor 40."""
    changes = {"deepseek2.rope.scaling.factor": 40.0}
    hp = read(path_of, "yarn", kv=changes)
    scale = 1 + 0.1 * 0.707 * math.log(40)
    assert hp.rope.magnitude() == pytest.approx(1.0)
    assert hp.attn_scale == pytest.approx(scale**2 / math.sqrt(NOPE + N_ROT))
    hp = read(path_of, "yarn-unfolded", kv=changes)
    scale = 1 + 0.1 * math.log(40)
    assert hp.rope.magnitude() == pytest.approx(scale)
    assert hp.attn_scale == pytest.approx(scale**2 / math.sqrt(NOPE + N_ROT))


def test_layers_that_predict_further_tokens_are_left_out(path_of, settings):
    kind = Kind(kv={**V3, **GROUPS})
    more = {
        name.replace("blk.2.", "blk.3."): np.zeros(shape, np.float32)
        for name, shape in ((f"{n}.weight", s) for n, s in tensor_shapes(kind).items())
        if name.startswith("blk.2.")
    }
    more["blk.3.nextn.eh_proj.weight"] = np.zeros((N_EMBD, 2 * N_EMBD), np.float32)
    more["blk.3.exp_probs_b.bias"] = np.zeros(N_EXPERT, np.float32)
    given = spec(kind)
    given["kv"].append(["deepseek2.nextn_predict_layers", ["UINT32"], 1])
    path = path_of("v3").with_name("next.gguf")
    write_tiny(given, path, kv={"deepseek2.block_count": N_LAYER + 1}, extra=more)
    hp = deepseek2.hparams(open_gguf(path))
    assert (hp.n_layer, hp.n_layer_next) == (N_LAYER, 1)
    lm = load(path, n_ctx=64, exact=True, settings=settings)
    assert_close(lm.logits(TOKENS), Reference(kind).logits(TOKENS), TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"expert_count": 0},
            "expert_count is 0 or missing, but the layers from 1 on have experts",
        ),
        ({"expert_count": 0, "leading_dense_block_count": N_LAYER - 1}, "the layers from 2 on"),
        ({"attention.key_length_mla": N_ROT}, "heads of 8 values have no room beside 8"),
    ],
)
def test_files_that_do_not_fit(path_of, changes, message):
    with pytest.raises(ModelError, match=message):
        read(path_of, kv={f"deepseek2.{key}": value for key, value in changes.items()})


def test_a_dense_file_needs_no_key_of_experts(path_of):
    drop = tuple(f"deepseek2.expert_{key}" for key in ("count", "used_count", "shared_count"))
    assert read(path_of, "dense", drop=drop).moe is None
    with pytest.raises(ModelError, match="but the layers from 0 on have experts"):
        read(path_of, "dense", drop=(*drop, "deepseek2.leading_dense_block_count"))


@pytest.mark.parametrize("lite", [True, False])
def test_what_reads_the_layers_input_is_one_group(path_of, lite):
    queries = "attn_q" if lite else "attn_q_a"
    groups = deepseek2.tensors(read(path_of, "v2-lite" if lite else "v3")).groups
    assert (f"blk.1.{queries}.weight", "blk.1.attn_kv_a_mqa.weight") in groups


def test_experts_of_a_width_that_no_tile_ends_with_are_left_to_xla(
    native_library, path_of, settings
):
    given = spec(KINDS["all-experts"])
    for name, ne, _ in given["tensors"]:
        if "exps" in name:
            ne[0 if "down" in name else 1] = 24
        elif "shexp" in name:
            ne[0 if "down" in name else 1] = 24 * N_SHARED
    kv = {"deepseek2.expert_feed_forward_length": 24}
    path = write_tiny(given, path_of("v3").with_name("narrow.gguf"), kv=kv)
    lm = load(path, n_ctx=64, settings=settings)
    with pytest.raises(ModelError, match="a multiple of 16 rows, not of 24; MINFER_KERNELS=xla"):
        lm.logits(TOKENS)
    assert load(path, n_ctx=64, exact=True, settings=settings).logits(TOKENS).shape == (12, 40)


def test_a_temperature_by_position_is_refused(path_of):
    given = spec(KINDS["v3"])
    given["kv"].append(["deepseek2.attention.temperature_scale", ["FLOAT32"], 0.1])
    path = write_tiny(given, path_of("v3").with_name("temperature.gguf"))
    with pytest.raises(ModelError, match="a temperature by position is not supported"):
        deepseek2.hparams(open_gguf(path))


def test_glm_4_7_flash_gates_with_sigmoids_though_its_files_do_not_say_so(path_of):
    def gating(n_layer, n_vocab):
        path = path_of("v3").with_name("flash.gguf")
        given = spec(KINDS["v3"])
        for tensor in given["tensors"]:
            if tensor[0] == "token_embd.weight":
                tensor[1] = [32, n_vocab]
        drop = ("deepseek2.expert_gating_func",)
        kv = {"deepseek2.block_count": n_layer}
        return deepseek2.hparams(open_gguf(write_tiny(given, path, kv=kv, drop=drop))).moe.gating

    assert gating(47, 154880) == "sigmoid"
    assert gating(47, 154881) == gating(46, 154880) == "softmax"
