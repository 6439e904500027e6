"""A tiny llama in float64 numpy: its logits for any tokens at any positions.

In one layer a token's key and value depend on the token and its position alone. So what is right
after removals and shifts can be said without a cache: attend to whatever is held, wherever it is.
In deeper ones they also carry what the token attended to when it was fed: each keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import read_spec, tensor_values, write_tiny

NAME = "llama-gqa-dense"
N_HEAD, N_HEAD_KV, D = 8, 2, 32
EPS = 9.999999747378752e-06


def write_one_layer(path: Path, name: str = NAME) -> Path:
    """The tiny model without its second layer."""
    spec = read_spec(name)
    arch = dict((key, value) for key, _, value in spec["kv"])["general.architecture"]
    second = tuple(tensor for tensor, _, _ in spec["tensors"] if tensor.startswith("blk.1."))
    return write_tiny(spec, path, kv={f"{arch}.block_count": 1}, drop=second)


def _tensors() -> dict[str, np.ndarray]:
    return {
        name: tensor_values(name, int(np.prod(ne))).reshape(ne[::-1]).astype(np.float64)
        for name, ne, _ in read_spec(NAME)["tensors"]
    }


Entry = list[tuple[np.ndarray, np.ndarray]]
"""A token's key, not rotated, and value in every layer: [heads, 32] each."""


class DenseLlama:
    """`logits` of the last of tokens that see each other, whatever their positions."""

    def __init__(self) -> None:
        self._t = _tensors()

    def logits(self, held: Sequence[tuple[int, int]]) -> np.ndarray:
        """After the last of (position, token) pairs, which sees all of them: [n_vocab]."""
        return self.answer(held[-1], *self.keys_values(held))

    def keys_values(self, held: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """What (position, token) pairs store: [n, heads, 32] each."""
        pos = np.array([p for p, _ in held], np.float64)
        x = self._t["token_embd.weight"][[token for _, token in held]]
        normed = self._norm(x, "blk.0.attn_norm")
        k = self._product(normed, "attn_k").reshape(-1, N_HEAD_KV, D)
        return self.turned(k, pos), self._product(normed, "attn_v").reshape(-1, N_HEAD_KV, D)

    def answer(self, last: tuple[int, int], k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """The logits of a (position, token) that sees these keys and values, its own included."""
        pos, token = last
        x = self._layer(0, self._t["token_embd.weight"][token], pos, k, v)
        return self._t["output.weight"] @ self._norm(x, "output_norm")

    def feed(
        self, held: Sequence[tuple[int, Entry]], pos: int, token: int, n_layer: int
    ) -> tuple[Entry, np.ndarray]:
        """What a token at `pos` keeps, and its logits, if it sees what others keep, wherever they
        are by now."""
        x = self._t["token_embd.weight"][token]
        at = np.array([*(p for p, _ in held), pos], np.float64)
        entry: Entry = []
        for il in range(n_layer):
            normed = self._norm(x, f"blk.{il}.attn_norm")
            k, v = (self._product(normed, f"attn_{n}", il).reshape(N_HEAD_KV, D) for n in "kv")
            entry.append((k, v))
            seen = [*(e[il] for _, e in held), (k, v)]
            keys = self.turned(np.stack([k for k, _ in seen]), at)
            x = self._layer(il, x, pos, keys, np.stack([v for _, v in seen]))
        return entry, self._t["output.weight"] @ self._norm(x, "output_norm")

    def _layer(self, il: int, x: np.ndarray, pos: int, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Layer `il` on x [n_embd] at `pos`, which sees k and v [n, heads, 32]."""
        normed = self._norm(x, f"blk.{il}.attn_norm")
        q = self._product(normed, "attn_q", il).reshape(1, N_HEAD, D)
        q = self.turned(q, np.array([pos], np.float64))
        out = np.empty((N_HEAD, D))
        for h in range(N_HEAD):
            kv = h // (N_HEAD // N_HEAD_KV)
            scores = k[:, kv] @ q[0, h] / np.sqrt(D)
            p = np.exp(scores - scores.max())
            out[h] = p / p.sum() @ v[:, kv]
        y = x + self._product(out.reshape(-1), "attn_output", il)
        normed = self._norm(y, f"blk.{il}.ffn_norm")
        gate = self._product(normed, "ffn_gate", il)
        gated = gate / (1.0 + np.exp(-gate)) * self._product(normed, "ffn_up", il)
        return y + self._product(gated, "ffn_down", il)

    def _product(self, x: np.ndarray, name: str, il: int = 0) -> np.ndarray:
        return x @ self._t[f"blk.{il}.{name}.weight"].T + self._t[f"blk.{il}.{name}.bias"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
        return x / scale * self._t[f"{name}.weight"]

    def turned(self, x: np.ndarray, pos: np.ndarray) -> np.ndarray:
        """Heads [n, h, d], pairs of neighbours turned by positions [n]."""
        freq = 10000.0 ** (-np.arange(0, D, 2) / D) / self._t["rope_freqs.weight"]
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * pos[:, None] * freq)[:, None, :]
        out: Any = np.empty_like(x)
        out[..., 0::2], out[..., 1::2] = z.real, z.imag
        return out
