"""All tokenizers against llama.cpp's ids, pieces and special tokens, and on the real models."""

import functools
import json
import subprocess
import sys

import pytest

from minfer_jax.tokenizer import load_tokenizer

VOCABULARIES = (
    *("llama-spm", "phi-3", "llama-bpe", "qwen2", "gpt-2", "falcon", "starcoder"),
    *("deepseek-coder", "bert-bge"),
)
REAL = {"smollm2-135m": "smollm2_path", "gemma3-270m": "gemma3_path"}

load = functools.cache(load_tokenizer)


@pytest.fixture(params=[*VOCABULARIES, *REAL])
def pair(request, conformance_dir):
    """A tokenizer and what llama.cpp says about it."""
    name = request.param
    folder = conformance_dir / "tokenizer"
    expected = json.loads((folder / f"{name}.json").read_text("utf-8"))
    if name in REAL:
        return load(request.getfixturevalue(REAL[name])), expected
    return load(folder / f"{name}.gguf"), expected


def test_ids_without_specials(pair):
    tokenizer, expected = pair
    for case in expected["cases"]:
        ids = tokenizer.encode(case["text"], add_special=False, parse_special=False)
        assert ids == case["ids"], case["text"]


def test_ids_with_specials(pair):
    tokenizer, expected = pair
    for case in expected["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids_special"], case["text"]


def test_pieces(pair):
    tokenizer, expected = pair
    for token_id, piece in expected["pieces_hex"].items():
        assert tokenizer.piece(int(token_id)).hex() == piece, token_id


def test_special_ids(pair):
    tokenizer, expected = pair
    ids = {name: expected[name] if expected[name] >= 0 else None for name in ("bos", "eos", "eot")}
    assert {name: getattr(tokenizer, name) for name in ids} == ids
    assert sorted(tokenizer.eog) == expected["eog"]
    for name in ("n_vocab", "add_bos", "add_eos"):
        assert getattr(tokenizer, name) == expected[name]


# WordPiece drops case and spaces by design.
@pytest.mark.parametrize(
    "pair", [n for n in (*VOCABULARIES, *REAL) if n != "bert-bge"], indirect=True
)
def test_round_trip(pair):
    tokenizer, expected = pair
    for case in expected["cases"]:
        text = case["text"]
        if tokenizer.pre == "falcon":
            text = text.replace("\v", "")  # Falcon's vocabulary has no token for this byte.
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert tokenizer.decode(ids) == text


def test_t05_only_control_tokens_may_be_empty(pair):
    tokenizer, _ = pair
    assert all(tokenizer.piece(i) for i in range(tokenizer.n_vocab))


@pytest.mark.parametrize("run", ["A", ".", " ", "\n", "字"])
def test_t06_long_runs(pair, run):
    tokenizer, _ = pair
    text = run * (30000 if run == "字" else 131072)
    ids = tokenizer.encode(text, add_special=False)
    if tokenizer.model != "bert":
        assert tokenizer.decode(ids) == text


SMOLLM2 = {
    "T01": (b"\xe6\xad", [24211, 24211]),
    "T03": ("\t" * 6 + "test", [6363, 197, 197, 2129]),
    "T04": ("<|im_start|>user", [1, 4093]),
    "T07 digits": ("1234567 and 501", [33, 34, 35, 36, 37, 38, 39, 284, 216, 37, 32, 33]),
    "T07 numbers": ("١٢٣ ½ Ⅷ", [164, 111, 164, 112, 164, 113, 216, 16738, 216, 173, 223, 117]),
    "T11 composed": ("café", [83, 1939, 2756]),
    "T11 decomposed": ("cafe\u0301", [83, 9980, 151, 219]),
    "V02": ("😀", [10813, 242, 218]),
}
GEMMA3 = {
    "T01": (b"\xe6\xad", [468, 411]),
    "T03": ("\t" * 6 + "test", [255973, 2181]),
    "T04": ("<start_of_turn>user", [105, 2364]),
    "T04 user-defined": ("<h1>Hi</h1>", [184, 10979, 191]),
    "T10 nul": ("a\x00b", [236746, 238, 236763]),
    "T10 literal": ("<0x0A>", [236820, 236771, 236781, 236771, 236776, 236813]),
    "T10 private use": ("\ue000\U000f0000", [245863, 481, 414, 366, 366]),
    "T11 composed": ("café", [123125, 236859]),
    "T11 decomposed": ("cafe\u0301", [101727, 238288]),
}


@pytest.mark.parametrize("report", SMOLLM2)
def test_field_reports_on_smollm2(smollm2_path, report):
    text, ids = SMOLLM2[report]
    tokenizer = load(smollm2_path)
    assert tokenizer.encode(text, add_special=False) == ids
    if isinstance(text, str):
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("report", GEMMA3)
def test_field_reports_on_gemma3(gemma3_path, report):
    text, ids = GEMMA3[report]
    tokenizer = load(gemma3_path)
    assert tokenizer.encode(text, add_special=False) == ids
    assert tokenizer.decode_bytes(ids) == (text.encode() if isinstance(text, str) else text)


def test_t04_without_parsing_control_tokens_are_text(smollm2_path, gemma3_path):
    ids = load(smollm2_path).encode("<|im_start|>user", False, False)
    assert ids == [44, 108, 306, 79, 3738, 108, 46, 4093]
    ids = load(gemma3_path).encode("<start_of_turn>user", False, False)
    assert ids == [236820, 3041, 236779, 1340, 236779, 887, 236813, 2364]
    assert load(gemma3_path).encode("<h1>Hi</h1>", False, False) == [184, 10979, 191]


LONG_RUNS = """
import sys
from minfer_jax.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
for run in ["A" * 131072, "." * 131072, " " * 131072, "\\n" * 131072, "\\u5b57" * 30000]:
    ids = tokenizer.encode(run, add_special=False)
    assert tokenizer.decode(ids) == run
"""


@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_t06_long_runs_end(request, model):
    """In a process of its own, so that a rule that backtracks for hours is a failure."""
    command = [sys.executable, "-c", LONG_RUNS, str(request.getfixturevalue(model))]
    subprocess.run(command, check=True, timeout=60)
