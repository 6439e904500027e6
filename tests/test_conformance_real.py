"""The two real models against llama.cpp's float32 logits: six prompts, 32 greedy steps each; and
the fast mode against the exact one.

The decode steps are fed the golden's tokens, so that one doubtful choice does not spoil the rest.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer_jax.batch import Batch
from minfer_jax.context import Context
from minfer_jax.lm import LanguageModel, load
from minfer_jax.settings import Settings

pytestmark = pytest.mark.slow

DATA = Path(__file__).parent / "data" / "real"
PROMPTS = ("fox", "capital", "count", "code", "unicode", "story")
TOLERANCE = 2e-3  # of the golden's largest magnitude
CLEAR_GAP = 0.05  # between the best two logits; below it another summation order may choose


class Golden:
    """One model's goldens."""

    def __init__(self, name: str) -> None:
        self.prompts = json.loads((DATA / f"{name}.json").read_text())["prompts"]
        self.arrays = np.load(DATA / f"{name}.npz")

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[key]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request, tmp_path_factory) -> tuple[LanguageModel, Golden]:
    """The model in exact mode, and its goldens."""
    path = request.getfixturevalue(f"{request.param}_path")
    settings = Settings(home=tmp_path_factory.mktemp("home"))
    return load(path, n_ctx=512, exact=True, settings=settings), Golden(request.param)


def teacher_forced(context: Context, prompt: dict[str, Any]) -> np.ndarray:
    """Logits after every token of prompt and greedy continuation: prefill, then step by step."""
    ids, greedy = prompt["ids"], prompt["greedy"]
    context.memory.clear()
    assert context.decode(Batch(token=ids, logits=[True] * len(ids))) == 0
    rows = [context.all_logits()]
    for token in greedy:
        assert context.decode(Batch(token=[token])) == 0
        rows.append(context.all_logits())
    return np.concatenate(rows)


def lse(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=1)
    return top + np.log(np.exp(logits - top[:, None]).sum(axis=1))


@pytest.mark.parametrize("name", PROMPTS)
def test_every_position(case, name):
    lm, golden = case
    prompt = golden.prompts[name]
    assert lm.tokenizer.encode(prompt["text"]) == prompt["ids"]
    logits = teacher_forced(lm.context(n_ctx=512), prompt)
    n = len(prompt["ids"]) + len(prompt["greedy"])
    assert golden[f"{name}.top_ids"].shape == (n, 20) and len(logits) == n
    top = np.take_along_axis(logits, golden[f"{name}.top_ids"], axis=1)
    want = golden[f"{name}.top_logits"]
    assert np.abs(top - want).max() < TOLERANCE * np.abs(want).max()
    want = golden[f"{name}.lse"]
    assert np.abs(lse(logits) - want).max() < TOLERANCE * np.abs(want).max()
    chosen = logits[len(prompt["ids"]) - 1 : -1].argmax(axis=1)
    clear = np.asarray(prompt["greedy_gap"]) > CLEAR_GAP
    np.testing.assert_array_equal(chosen[clear], np.asarray(prompt["greedy"])[clear])
    assert clear.sum() >= 28


def test_mean_nll_of_the_prompts(case):
    lm, golden = case
    for prompt in golden.prompts.values():
        logits = lm.logits(prompt["ids"])[:-1]
        chosen = np.take_along_axis(logits, np.asarray(prompt["ids"])[1:, None], axis=1)[:, 0]
        assert np.mean(lse(logits) - chosen) == pytest.approx(prompt["mean_nll_prompt"], abs=2e-3)


def test_generate_gives_the_golden_text(case):
    lm, golden = case
    prompt = golden.prompts["capital"]
    result = lm.generate(prompt["text"], n=8, temp=0.0)
    assert result.ids == prompt["greedy"][:8]
    assert prompt["greedy_text"].startswith(result.text)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - lse(logits)[:, None]


# Mean KL divergence of llama.cpp's default path (int8 activations, float16 KV) from its own
# float32 logits on the same tokens, measured with llama-cpp-python 0.3.36 on AVX-512: over all of
# them, and over the greedy ones, which here are decoded one by one.
LLAMA_CPP_KL = {"smollm2": (0.00227, 0.00295), "gemma3": (0.00276, 0.00190)}


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_fast_mode_stays_close_to_exact(name, request, tmp_path):
    path = request.getfixturevalue(f"{name}_path")
    settings = Settings(home=tmp_path)
    exact = load(path, n_ctx=512, exact=True, settings=settings).context(n_ctx=512)
    fast = load(path, n_ctx=512, settings=settings).context(n_ctx=512)
    kl, agree, decoded = [], [], []
    for prompt in Golden(name).prompts.values():
        a, b = (log_softmax(teacher_forced(context, prompt)) for context in (exact, fast))
        kl.append((np.exp(a) * (a - b)).sum(axis=1))
        agree.append(a.argmax(axis=1) == b.argmax(axis=1))
        decoded.append(np.arange(len(a)) >= len(prompt["ids"]))
    kl, agree, decoded = (np.concatenate(x) for x in (kl, agree, decoded))
    assert decoded.sum() == 192
    for rows, llama_cpp in zip((slice(None), decoded), LLAMA_CPP_KL[name], strict=True):
        assert kl[rows].mean() < min(0.01, llama_cpp)
        assert agree[rows].mean() >= 0.97
