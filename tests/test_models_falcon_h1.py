"""Falcon-H1: both kinds of memory in every layer, and what its files have and nobody reads."""

from minfer_jax.gguf import open_gguf
from minfer_jax.models import falcon_h1


def test_every_layer_attends_and_keeps_a_state(tiny_path):
    hp = falcon_h1.hparams(open_gguf(tiny_path("falcon-h1-dense")))
    assert all(hp.attends(il) and hp.recurs(il) for il in range(2))
    assert hp.rope.style == "half" and hp.rope.n_rot == 128
    assert hp.states == ((3, 1024), (2, 128, 256))


def test_unused_tensors_are_not_loaded(tiny_path):
    """Loaded, the factors would change the rotation and the bias the attention."""
    file = open_gguf(tiny_path("falcon-h1-dense"))
    wanted = falcon_h1.tensors(falcon_h1.hparams(file))
    unused = {"rope_freqs.weight", "blk.0.attn_output.bias", "blk.1.attn_output.bias"}
    assert unused <= set(file.tensors)
    assert unused.isdisjoint({spec.name for spec in wanted.specs})
    assert set(wanted.ignored) == unused


def test_the_norm_and_the_bias_of_the_mixer_are_optional(tiny_path):
    wanted = falcon_h1.tensors(falcon_h1.hparams(open_gguf(tiny_path("falcon-h1-dense"))))
    optional = {spec.name for spec in wanted.specs if not spec.required}
    assert {"blk.0.ssm_norm.weight", "blk.0.ssm_conv1d.bias", "blk.0.attn_q.bias"} < optional
