"""RWKV-6: forms of older files and of other trainers, which mean the model of the golden."""

import numpy as np
import pytest
from tiny_models import golden, read_spec, tensor_values, write_tiny

from minfer_jax.errors import ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.lm import load
from minfer_jax.models import rwkv6
from minfer_jax.models.tensors import check_tensors
from minfer_jax.settings import Settings

NAME = "rwkv6-dense"
SHAPES = {name: tuple(ne[::-1]) for name, ne, _ in read_spec(NAME)["tensors"]}


def values(name):
    return tensor_values(name, int(np.prod(SHAPES[name]))).reshape(SHAPES[name])


def error(tmp_path, path):
    """Of the logits, in standard deviations."""
    lm = load(path, n_ctx=64, exact=True, settings=Settings(home=tmp_path))
    tokens, want = golden(NAME)
    return np.abs(lm.logits(tokens) - want).max() / want.std()


def test_hparams(tiny_path):
    p = rwkv6.hparams(open_gguf(tiny_path(NAME))).rwkv
    assert p and (p.head_size, p.mix_rank, p.decay_rank, p.rescale_every) == (32, 16, 24, 0)


def test_mixes_one_by_one_and_as_vectors(tmp_path):
    drop = tuple(name for name in SHAPES if "lerp" in name)
    extra = {name: values(name).reshape(-1) for name in drop if "fused" not in name}
    for il in range(2):
        fused = values(f"blk.{il}.time_mix_lerp_fused.weight").reshape(5, 64)
        extra |= {f"blk.{il}.time_mix_lerp_{x}.weight": fused["wkvrg".index(x)] for x in "rgkvw"}
    path = write_tiny(read_spec(NAME), tmp_path / "x.gguf", drop=drop, extra=extra)
    assert error(tmp_path, path) < 1e-3


@pytest.mark.parametrize(
    ("fused", "missing"),
    [({0: True, 1: False}, "blk.1.time_mix_lerp_fused"), ({}, "blk.0.time_mix_lerp_w")],
)
def test_mixes_that_are_missing_are_named(tmp_path, fused, missing):
    drop = tuple(n for n in SHAPES if "lerp_fused" in n and not fused.get(int(n.split(".")[1])))
    file = open_gguf(write_tiny(read_spec(NAME), tmp_path / "x.gguf", drop=drop))
    with pytest.raises(ModelError, match=f"tensor '{missing}.weight' is missing"):
        check_tensors(file, rwkv6.tensors(rwkv6.hparams(file)))


def test_activations_are_halved_where_the_weights_are_made_for_it(tmp_path):
    """With weights that add half as much from the second layer on, nothing changes: what reads the
    sum norms it."""
    halved = [f"blk.1.{name}.weight" for name in ("time_mix_output", "channel_mix_value")]
    spec = read_spec(NAME)
    spec["kv"].append(["rwkv6.rescale_every_n_layers", ["UINT32"], 1])
    path = write_tiny(
        spec,
        tmp_path / "x.gguf",
        drop=tuple(halved),
        extra={name: values(name) / 2 for name in halved},
    )
    assert error(tmp_path, path) < 1e-3


def test_a_mix_of_another_width_is_refused(tmp_path):
    name = "blk.1.time_mix_lerp_x.weight"
    extra = {name: np.zeros(32, np.float32)}
    path = write_tiny(read_spec(NAME), tmp_path / "x.gguf", drop=(name,), extra=extra)
    file = open_gguf(path)
    with pytest.raises(ModelError, match="time_mix_lerp_x"):
        check_tensors(file, rwkv6.tensors(rwkv6.hparams(file)))
