"""What was fed to each sequence: enough to evaluate it again if the regions are lost."""

from __future__ import annotations

from minfer_jax.batch import CheckedBatch


class History:
    """A list of tokens for every sequence, or None for one that is no plain list of tokens: with a
    shift, a removal in its middle, or embeddings as input."""

    def __init__(self, n_seq_max: int) -> None:
        self._tokens: list[list[int] | None] = [[] for _ in range(n_seq_max)]
        self._last_rows: dict[int, int] = {}
        """Of sequences that end with a row of the last batch, that row."""

    def last_row(self, seq: int) -> int | None:
        """The row of the last batch that is a sequence's last token; None if none is."""
        return self._last_rows.get(seq)

    def tokens(self, seq: int) -> list[int] | None:
        """The tokens of a sequence, from position 0 on."""
        held = self._tokens[seq]
        return None if held is None else list(held)

    def extend(self, batch: CheckedBatch) -> None:
        """The rows of a batch have been evaluated."""
        self._last_rows = {seq: i for i, row in enumerate(batch.seqs) for seq in row}
        rows = zip(batch.token.tolist(), batch.pos.tolist(), batch.seqs, strict=True)
        for token, pos, row in rows:
            for seq in row:
                if pos == 0:  # it was empty, whatever became of it before
                    self._tokens[seq] = []
                held = self._tokens[seq]
                if batch.embd is not None:
                    self._tokens[seq] = None
                elif held is not None:
                    held.append(token)

    def remove(self, seq: int, p0: int, p1: int) -> None:
        """Tokens at p0 <= position < p1 have been forgotten."""
        held = self._tokens[seq]
        if p0 < p1 and (held is None or p0 < len(held)):
            self._last_rows.pop(seq, None)
        if held is not None and p0 < p1 and p0 < len(held):
            self._tokens[seq] = held[:p0] if p1 >= len(held) else None

    def copy(self, source: int, target: int, p0: int, p1: int) -> None:
        """`target` holds what `source` holds at p0 <= position < p1."""
        held = self._tokens[source]
        self._tokens[target] = None if held is None or p0 > 0 else held[:p1]
        row = self._last_rows.get(source)
        self._last_rows.pop(target, None)
        if row is not None and held is not None and p0 <= 0 and p1 >= len(held):
            self._last_rows[target] = row

    def spoil(self, seq: int) -> None:
        """A sequence is no plain list of tokens any more."""
        self._tokens[seq] = None
        self._last_rows.pop(seq, None)

    def set(self, seq: int, tokens: list[int] | None) -> None:
        """A sequence has been loaded."""
        self._tokens[seq] = None if tokens is None else list(tokens)

    def set_last_rows(self, rows: dict[int, int]) -> None:
        """The outputs are those of another batch, in which these sequences end."""
        self._last_rows = dict(rows)

    def clear(self) -> None:
        self._last_rows = {}
        self._tokens = [[] for _ in self._tokens]
