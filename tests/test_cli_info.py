"""`info` on files that are whole, odd, damaged, or not there."""

import json

import numpy as np
import pytest
from gguf_builder import Tensor, f32_tensor, gguf_bytes, write_gguf
from test_cli_main import run_cli

MIB = 1 << 20
LLAMA = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.context_length": 256,
    "llama.block_count": 2,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 40,
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(40)],
    "odd": b"a\xffb",
    "few": np.array([1, 2, 3], np.int32),
}
# 2 layers x 2 heads x (16 + 16) columns x 2 bytes
KV_BYTES = 2 * 2 * 32 * 2


@pytest.fixture
def model(tmp_path):
    tensors = [
        f32_tensor("token_embd.weight", np.zeros((40, 64))),
        Tensor("b", (32,), 2, bytes(18)),
    ]
    return str(write_gguf(tmp_path / "model.gguf", LLAMA, tensors))


def test_json_has_it_all(model, capfd):
    result = run_cli(capfd, "info", "-m", model, "-c", "100", "--json")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)
    assert report["path"] == model and report["version"] == 3
    assert report["metadata"]["llama.block_count"] == 2
    assert report["metadata"]["few"] == [1, 2, 3]
    assert report["metadata"]["tokenizer.ggml.tokens"] == {"length": 40, "type": "str"}
    assert report["metadata"]["odd"] == "a\ufffdb"
    assert report["tensors"] == [
        {"name": "token_embd.weight", "shape": [40, 64], "type": "F32", "bytes": 10240},
        {"name": "b", "shape": [32], "type": "Q4_0", "bytes": 18},
    ]
    assert report["memory"] == {
        "weights_bytes": 10258,
        "kv_bytes_per_token": KV_BYTES,
        "state_bytes_per_sequence": 0,
        "n_ctx": 100,
        "kv_bytes": 256 * KV_BYTES,  # whole blocks
        "total_bytes": 10258 + 256 * KV_BYTES,
    }


def test_n_ctx_0_is_what_the_model_was_trained_for(model, capfd):
    report = json.loads(run_cli(capfd, "info", "-m", model, "-c", "0", "--json").out)
    assert report["memory"]["n_ctx"] == 256


def test_text_for_people(model, capfd):
    result = run_cli(capfd, "info", "-m", model, "-c", "4096")
    lines = result.out.splitlines()
    assert (result.code, result.err) == (0, "")
    assert lines[0] == f"{model}: GGUF v3, 0.0 MiB"
    assert "  general.architecture = 'llama'" in lines
    assert "  tokenizer.ggml.tokens = [40 x str]" in lines
    assert "  token_embd.weight  F32    40 x 64" in lines
    assert "  KV per token         0.2 KiB" in lines
    assert "  KV in all            1.0 MiB for n_ctx 4096, f16" in lines


def test_the_demo_model(smollm2_path, capfd, monkeypatch):
    monkeypatch.setenv("MINFER_MODEL", str(smollm2_path))
    report = json.loads(run_cli(capfd, "info", "--json").out)
    assert report["path"] == str(smollm2_path)
    assert report["metadata"]["general.architecture"] == "llama"
    assert len(report["tensors"]) == 272
    # 30 layers x 3 heads x (64 + 64) columns x 2 bytes
    assert report["memory"]["kv_bytes_per_token"] == 23040


def test_what_cannot_be_run_can_be_looked_at(tmp_path, capfd):
    tensor = Tensor("x", (256,), 99, bytes(64))
    path = str(write_gguf(tmp_path / "x.gguf", {"general.architecture": "rwkv6"}, [tensor]))
    result = run_cli(capfd, "info", "-m", path, "--json")
    report = json.loads(result.out)
    assert (result.code, result.err) == (0, "")
    assert report["tensors"] == [{"name": "x", "shape": [256], "type": "type id 99", "bytes": None}]
    assert "rwkv6.embedding_length" in report["memory"]["kv_unknown"]
    assert "KV            unknown: " in run_cli(capfd, "info", "-m", path).out


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a GGUF file"),
        (b"[build-system]\n" * 9, "not a GGUF file"),
        (gguf_bytes(LLAMA)[:200], "truncated"),
        (gguf_bytes({}, [f32_tensor("a", np.zeros(99))])[:-200], "truncated"),
    ],
)
def test_a_damaged_file_is_named(data, words, tmp_path, capfd):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    result = run_cli(capfd, "info", "-m", str(path))
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith(f"{path}: ") and words in result.error


def test_a_file_that_is_not_there(tmp_path, capfd):
    missing = tmp_path / "none.gguf"
    assert run_cli(capfd, "info", "-m", str(missing)).error == f"no such file: {missing}"
    error = run_cli(capfd, "info", "-m", str(tmp_path)).error
    assert error == f"{tmp_path} is a directory: pass the GGUF file in it"
    assert "one of: smollm2, gemma3-270m" in run_cli(capfd, "info", "-m", "").error
