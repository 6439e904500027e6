"""Delta net layers: which they are, their sizes, and what is not run."""

import numpy as np
import pytest
from tiny_models import read_spec, write_tiny

from minfer_jax.errors import GGUFError, ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models import qwen35
from minfer_jax.models.hparams import DeltaParams

LAYERS = "attention.recurrent_layers"


@pytest.fixture
def hparams(tmp_path):
    """Of the tiny Qwen3.5 with other metadata: {key: (types, value)}."""

    def hparams(changes):
        spec = read_spec("qwen35-dense")
        kv = {key: (types, value) for key, types, value in spec["kv"]}
        kv |= {f"qwen35.{key}": pair for key, pair in changes.items()}
        spec["kv"] = [[key, *pair] for key, pair in kv.items() if pair[1] is not None]
        return qwen35.hparams(open_gguf(write_tiny(spec, tmp_path / "x.gguf")))

    return hparams


def letters(hp):
    """One letter a layer: d for delta net, a for attention."""
    assert all(hp.recurs(il) != hp.attends(il) for il in range(hp.n_layer))
    return "".join("d" if hp.recurs(il) else "a" for il in range(hp.n_layer))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, "da"),
        ({LAYERS: (["ARRAY", "BOOL"], [False, True])}, "ad"),
        ({"block_count": (["UINT32"], 9), LAYERS: (["ARRAY"], None)}, "dddadddad"),
        (
            {
                "block_count": (["UINT32"], 6),
                LAYERS: (["ARRAY"], None),
                "full_attention_interval": (["UINT32"], 3),
            },
            "ddadda",
        ),
        (
            {"nextn_predict_layers": (["UINT32"], 1), "block_count": (["UINT32"], 3)},
            "da",
        ),
    ],
)
def test_which_layers_attend(hparams, changes, layers):
    hp = hparams(changes)
    assert letters(hp) == layers
    assert hp.n_layer_next == ("nextn_predict_layers" in changes)


def test_a_list_that_is_too_short_is_refused(hparams):
    with pytest.raises(GGUFError, match="recurrent_layers has 1 entries for 2 layers"):
        hparams({LAYERS: (["ARRAY", "BOOL"], [True])})


def test_sizes(hparams):
    hp = hparams({"ssm.group_count": (["UINT32"], 1)})
    assert hp.delta == DeltaParams(d_conv=4, head_dim=128, n_head_k=1, n_head_v=2)
    assert hp.states == ((3, 2 * 128 + 256), (2, 128, 128))


@pytest.mark.parametrize(
    ("key", "value"), [("ssm.group_count", 3), ("ssm.inner_size", 512), ("ssm.state_size", 64)]
)
def test_sizes_that_do_not_fit_are_refused(hparams, key, value):
    with pytest.raises(ModelError, match="value heads of"):
        hparams({key: (["UINT32"], value)})


def test_keys_and_values_must_be_equally_wide(hparams):
    with pytest.raises(ModelError, match="keys of 128 and values of 64"):
        hparams({"attention.value_length": (["UINT32"], 64)})


def test_tensors_of_layers_that_are_not_run_may_be_there(hparams):
    hp = hparams({"nextn_predict_layers": (["UINT32"], 1), "block_count": (["UINT32"], 3)})
    wanted = qwen35.tensors(hp)
    assert {"blk.2.attn_q.weight", "blk.2.nextn.eh_proj.weight"} <= set(wanted.ignored)
    assert not any(spec.name.startswith("blk.2.") for spec in wanted.specs)
    assert np.unique(list(wanted.ignored)).size == len(wanted.ignored)
