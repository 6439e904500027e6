"""Packed arrays: what is joined, where a tensor's rows lie, and that no value changes."""

import gguf
import jax
import numpy as np
import pytest
from gguf.quants import dequantize
from tiny_models import read_spec, write_tiny

from minfer_jax.errors import ModelError
from minfer_jax.gguf import GGMLType, open_gguf
from minfer_jax.models import llama
from minfer_jax.models.packing import WeightForm
from minfer_jax.models.weights import RowRange, load_weights
from minfer_jax.ops.qtensor import QTensor

ARCH = "llama-gqa-dense"  # two layers; 256 rows of Q, 64 of K and of V, 384 of gate and of up
QUANTIZE = {
    # Of the first layer Q and K have one type; of the second Q and V.
    "blk.1.attn_k.weight": "Q5_0",
    "attn_q.weight": "Q8_0",
    "blk.0.attn_k.weight": "Q8_0",
    "blk.0.attn_v.weight": "Q4_0",
    "blk.1.attn_v.weight": "Q8_0",
    "ffn_gate.weight": "Q5_1",
    "blk.0.ffn_up.weight": "Q5_1",
    "blk.1.ffn_up.weight": "Q4_1",
    "ffn_down.weight": "BF16",
    "token_embd.weight": "F16",
    "attn_norm.weight": "F16",
    "attn_q.bias": "BF16",
}


@pytest.fixture(scope="module")
def device():
    return jax.devices("cpu")[0]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    return open_gguf(write_tiny(read_spec(ARCH), path, quantize=QUANTIZE))


@pytest.fixture(scope="module")
def wanted(mixed):
    return llama.tensors(llama.hparams(mixed))


@pytest.fixture(scope="module")
def loaded(mixed, wanted, device):
    return load_weights(mixed, wanted, device, WeightForm.PLANES)


@pytest.fixture(scope="module")
def view(loaded):
    return loaded.view(loaded.leaves)


def file_values(file, name):
    """By the gguf package."""
    info = file.tensors[name]
    rows = file.raw(name).reshape(info.shape[0] if len(info.shape) == 2 else 1, -1)
    values = dequantize(rows, gguf.GGMLQuantizationType(info.type_id))
    return values.reshape(info.shape)


def array_of(il, *names):
    return "+".join(f"blk.{il}.{name}.weight" for name in names)


def test_tensors_of_a_group_are_joined_as_far_as_their_types_are_equal(view):
    expected = {}
    for il, qkv in enumerate([("attn_q", "attn_k"), ("attn_q", "attn_v")]):
        joined = array_of(il, *qkv)
        expected[array_of(il, qkv[0])] = RowRange(joined, 0, 256)
        expected[array_of(il, qkv[1])] = RowRange(joined, 256, 320)
    expected["blk.0.attn_v.weight"] = RowRange("blk.0.attn_v.weight", 0, 64)
    expected["blk.1.attn_k.weight"] = RowRange("blk.1.attn_k.weight", 0, 64)
    gate_up = array_of(0, "ffn_gate", "ffn_up")
    expected["blk.0.ffn_gate.weight"] = RowRange(gate_up, 0, 384)
    expected["blk.0.ffn_up.weight"] = RowRange(gate_up, 384, 768)
    for name in ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"):
        expected[name] = RowRange(name, 0, 384)
    for name, rows in (("attn_output", 256), ("ffn_down", 256)):
        for il in range(2):
            expected[array_of(il, name)] = RowRange(array_of(il, name), 0, rows)
    for name in ("token_embd.weight", "output.weight"):
        expected[name] = RowRange(name, 0, 128)
    assert view.ranges == expected
    types = {name: view.packed(r.array).type.name for name, r in view.ranges.items()}
    assert types["blk.1.attn_q.weight"] == "Q8_0" and types["blk.1.attn_k.weight"] == "Q5_0"


def test_equal_types_are_one_array(tiny_path, device):
    file = open_gguf(tiny_path(ARCH))
    loaded = load_weights(file, llama.tensors(llama.hparams(file)), device, WeightForm.PLANES)
    view = loaded.view(loaded.leaves)
    for il in range(2):
        joined = array_of(il, "attn_q", "attn_k", "attn_v")
        assert view.packed(joined).shape == (256 + 64 + 64, 256)
        assert view.ranges[f"blk.{il}.attn_v.weight"] == RowRange(joined, 320, 384)
        assert view.packed(array_of(il, "ffn_gate", "ffn_up")).shape == (768, 256)
    # All of this file is float32, so nothing grows or shrinks.
    assert loaded.nbytes == sum(info.nbytes for info in file.tensors.values())


def test_every_matrix_has_the_values_of_the_file(mixed, view):
    matrices = [name for name, info in mixed.tensors.items() if len(info.shape) == 2]
    assert view.ranges.keys() == set(matrices)
    for name in matrices:
        info, matrix = mixed.tensors[name], view.matrix(name)
        assert (matrix.type, matrix.shape) == (info.type, info.shape)
        values = jax.jit(QTensor.dequantize)(matrix)
        np.testing.assert_array_equal(values, file_values(mixed, name), err_msg=name)


@pytest.fixture(params=WeightForm)
def form(request):
    if request.param is WeightForm.TILED:
        request.getfixturevalue("native_library")
    return request.param


def test_rows_taken_from_any_form_have_the_values_of_the_file(mixed, wanted, device, form):
    loaded = load_weights(mixed, wanted, device, form)
    view = loaded.view(loaded.leaves)
    take = jax.jit(lambda matrix, ids: matrix.take(ids))
    for name in view.ranges:
        n_out = mixed.tensors[name].shape[0]
        matrix = view.matrix(name)
        assert (matrix.type, matrix.shape) == (mixed.tensors[name].type, mixed.tensors[name].shape)
        ids = np.array([n_out - 1, 0, n_out // 2], np.int32)
        values = take(matrix, ids)
        np.testing.assert_array_equal(values, file_values(mixed, name)[ids], err_msg=name)


def test_every_vector_is_float32_and_has_the_values_of_the_file(mixed, view):
    vectors = [name for name, info in mixed.tensors.items() if len(info.shape) == 1]
    types = {mixed.tensors[name].type for name in vectors}
    assert types == {GGMLType.F32, GGMLType.F16, GGMLType.BF16}
    for name in vectors:
        vector = view.vector(name)
        assert vector.dtype == np.float32
        np.testing.assert_array_equal(vector, file_values(mixed, name), err_msg=name)


def test_packed_weights_are_as_large_as_the_file_says(mixed, loaded):
    # A vector of 2-byte floats doubles, everything else keeps its bytes.
    expected = sum(
        info.nbytes if len(info.shape) == 2 else 4 * info.shape[0]
        for info in mixed.tensors.values()
    )
    assert loaded.nbytes == expected == sum(leaf.nbytes for leaf in loaded.leaves)


def test_names(view):
    assert "blk.0.attn_q.weight" in view and "blk.0.attn_q.bias" in view
    assert "output.bias" not in view and "rope_freqs.weight" in view


def test_a_view_of_traced_leaves(mixed, loaded):
    @jax.jit
    def doubled(leaves):
        view = loaded.view(leaves)
        assert view.matrix("blk.0.attn_v.weight").shape == (64, 256)
        return view.vector("output_norm.weight") * 2.0

    expected = file_values(mixed, "output_norm.weight") * np.float32(2.0)
    np.testing.assert_array_equal(doubled(loaded.leaves), expected)


def test_progress_rises_to_the_bytes_of_the_file(mixed, wanted, device):
    calls = []
    load_weights(
        mixed, wanted, device, WeightForm.PLANES, lambda done, total: calls.append((done, total))
    )
    nbytes = sum(info.nbytes for info in mixed.tensors.values())
    done = [d for d, _ in calls]
    assert {total for _, total in calls} == {nbytes}
    assert done == sorted(set(done)) and done[0] > 0 and done[-1] == nbytes
    assert len(calls) == len(mixed.tensors) - 3  # Q+K, Q+V and gate+up are one array each


def test_a_bad_file_is_refused_before_anything_is_packed(tmp_path, wanted, device):
    path = write_tiny(read_spec(ARCH), tmp_path / "x.gguf", drop=("blk.1.ffn_down.weight",))
    calls = []
    with pytest.raises(ModelError, match=r"tensor 'blk\.1\.ffn_down\.weight' is missing"):
        load_weights(
            open_gguf(path), wanted, device, WeightForm.PLANES, lambda *call: calls.append(call)
        )
    assert calls == []


def test_every_leaf_is_aligned(loaded):
    assert {leaf.unsafe_buffer_pointer() % 64 for leaf in loaded.leaves} == {0}


@pytest.mark.parametrize("own", [True, False])
def test_only_a_head_of_q8_0_is_split(tmp_path, device, native_library, own):
    spec = read_spec("llama-dense")
    quantize = dict.fromkeys(("token_embd.weight", "output.weight", "attn_output.weight"), "Q8_0")
    path = write_tiny(
        spec, tmp_path / "a.gguf", quantize=quantize, drop=() if own else ("output.weight",)
    )
    file = open_gguf(path)
    wanted = llama.tensors(llama.hparams(file))
    for split_head in (True, False):
        loaded = load_weights(file, wanted, device, WeightForm.TILED, split_head=split_head)
        view = loaded.view(loaded.leaves)
        split = {name for name in view.ranges if view.matrix(name).split}
        assert split == ({"output.weight" if own else "token_embd.weight"} if split_head else set())
        values = jax.jit(lambda m, ids: m.take(ids))(view.matrix("token_embd.weight"), np.arange(3))
        np.testing.assert_array_equal(values, file_values(file, "token_embd.weight")[:3])


def test_every_step_gets_each_array_once(mixed, wanted, device, form):
    loaded = load_weights(mixed, wanted, device, form)
    assert len({id(leaf) for leaf in loaded.leaves}) == len(loaded.leaves)
    vectors = sum(len(info.shape) == 1 for info in mixed.tensors.values())
    if form is WeightForm.TILED:  # one array for all tiles
        assert len(loaded.leaves) == vectors + 1
    view = loaded.view(loaded.leaves)
    assert view.vector("output_norm.weight") is not view.vector("blk.0.attn_norm.weight")
