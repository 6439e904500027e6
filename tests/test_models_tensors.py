"""The list of a family's tensors, and the check of a file against it."""

import subprocess
import sys

import numpy as np
import pytest
from gguf_builder import Tensor, f32_tensor, write_gguf
from tiny_models import ARCHS, read_spec

from minfer_jax.errors import ModelError
from minfer_jax.gguf import open_gguf
from minfer_jax.models.registry import architecture
from minfer_jax.models.tensors import TensorList, TensorSpec, check_tensors

WANTED = TensorList(
    (
        TensorSpec("first", (2, 3)),
        TensorSpec("maybe", (4,), required=False),
        TensorSpec("last", (5, 256)),
    )
)
FIRST = f32_tensor("first", np.zeros((2, 3)))
MAYBE = f32_tensor("maybe", np.zeros(4))
LAST = f32_tensor("last", np.zeros((5, 256)))


@pytest.fixture
def check(tmp_path):
    def check(*tensors):
        path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, tensors)
        return [info.name for info in check_tensors(open_gguf(path), WANTED)]

    return check


def test_tensors_come_in_the_order_of_the_list(check):
    assert check(LAST, MAYBE, FIRST) == ["first", "maybe", "last"]


def test_an_optional_tensor_may_be_absent(check):
    assert check(LAST, FIRST) == ["first", "last"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([FIRST, MAYBE], "tensor 'last' is missing$"),
        (
            [f32_tensor("first", np.zeros((3, 2))), LAST],
            r"tensor 'first' has shape \[3, 2\], expected \[2, 3\]$",
        ),
        (
            [FIRST, LAST, f32_tensor("maybe", np.zeros((1, 4)))],
            r"tensor 'maybe' has shape \[1, 4\], expected \[4\]$",
        ),
        (
            [FIRST, LAST, f32_tensor("other", [1.0])],
            "llama models have no tensor 'other'; this variant .* is not supported$",
        ),
        (
            [f32_tensor("x", [1.0]), FIRST, LAST, *(f32_tensor(c, [1.0]) for c in "yz")],
            "llama models have no tensor 'x' and 2 more; this variant",
        ),
        (
            [FIRST, Tensor("last", (256, 5), 16, bytes(5 * 66))],
            "tensor 'last' \\(IQ2_XXS\\) cannot be computed with;"
            " supported: F32, F16, .*Q4_K.*Q6_K$",
        ),
        (
            [FIRST, Tensor("last", (256, 5), 99, bytes(5 * 66))],
            "tensor 'last' \\(type id 99\\) cannot be computed with",
        ),
        (
            [FIRST, LAST, Tensor("maybe", (4,), 26, bytes(16))],
            "tensor 'maybe' \\(I32\\) cannot be computed with",
        ),
    ],
)
def test_what_is_refused(check, tensors, message):
    with pytest.raises(ModelError, match=rf"x\.gguf: {message}"):
        check(*tensors)


@pytest.mark.parametrize("name", ARCHS)
def test_lists_fit_the_tensors_that_llama_cpp_writes(tiny_path, name):
    file = open_gguf(tiny_path(name))
    family = architecture(file)
    wanted = family.tensors(family.hparams(file))
    plain = wanted.plain

    def shape(tensor: str, dims: list[int]) -> tuple[int, ...]:
        """Of plain tensors, dimensions of one do not matter."""
        return tuple(n for n in dims if n != 1 or tensor not in plain)

    written = {
        tensor: shape(tensor, ne[::-1])
        for tensor, ne, _ in read_spec(name)["tensors"]
        if tensor not in wanted.ignored
    }
    listed = {spec.name: shape(spec.name, list(spec.shape)) for spec in wanted.specs}
    assert len(listed) == len(wanted.specs)
    assert {tensor: listed.get(tensor) for tensor in written} == written
    assert {spec.name for spec in wanted.specs if spec.required} <= written.keys()
    assert len(check_tensors(file, wanted)) == len(written)


def test_groups_are_what_reads_the_same_activations(tiny_path):
    file = open_gguf(tiny_path("llama-dense"))
    family = architecture(file)
    wanted = family.tensors(family.hparams(file))
    assert wanted.groups == tuple(
        tuple(f"blk.{il}.{name}.weight" for name in group)
        for il in range(2)
        for group in (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
    )


def test_it_needs_no_jax():
    code = "import sys, minfer_jax.models.tensors; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
