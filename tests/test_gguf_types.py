"""ggml type ids and block sizes, against the gguf package's tables."""

import subprocess
import sys

import gguf

from minfer_jax.gguf import BLOCK_SIZES, GGMLType, TensorInfo


def test_sizes_equal_the_oracle_for_every_type_it_knows():
    oracle = {(t.name, int(t)): size for t, size in gguf.GGML_QUANT_SIZES.items()}
    ours = {(t.name, int(t)): size for t, size in BLOCK_SIZES.items()}
    assert oracle.items() <= ours.items()
    assert set(BLOCK_SIZES) == set(GGMLType)


def test_q2_0_is_a_half_and_sixteen_bytes_for_64_values():
    # Newer than the oracle: ggml's block_q2_0 is a float16 and 64 two-bit values.
    assert BLOCK_SIZES[GGMLType.Q2_0] == (64, 2 + 64 * 2 // 8)


def test_type_names_for_messages():
    def named(type_id: int, type_: GGMLType | None = None) -> str:
        info = TensorInfo(name="t", shape=(1,), type=type_, type_id=type_id, offset=0, nbytes=None)
        return info.type_name()

    assert named(12, GGMLType.Q4_K) == "Q4_K"
    assert named(4) == "type id 4 (Q4_2, retired)"
    assert named(99) == "type id 99"


def test_the_room_imports_neither_jax_nor_gguf():
    code = "import sys, minfer_jax.gguf as g; print({'jax', 'gguf'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
