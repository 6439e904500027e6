"""What was fed to each sequence, and when that is no plain list of tokens any more."""

import numpy as np

from minfer_jax.batch import Batch, CheckedBatch, check_batch
from minfer_jax.history import History

END = 1 << 31


def batch(token=None, seq_id=None, n_past=(0, 0, 0), **fields) -> CheckedBatch:
    return check_batch(
        Batch(token=token, seq_id=seq_id, **fields),
        n_vocab=100,
        n_embd=2,
        n_past=n_past,
        alike=lambda a, b: True,
    )


def history(*tokens: int) -> History:
    """Sequence 0 holds these tokens."""
    log = History(3)
    log.extend(batch(tokens))
    return log


def test_rows_go_to_all_of_their_sequences():
    log = History(3)
    log.extend(batch([5, 6, 7, 8], [[0, 2], 1, [0, 2], 2]))
    assert [log.tokens(s) for s in range(3)] == [[5, 7], [6], [5, 7, 8]]
    assert [log.last_row(s) for s in range(3)] == [2, 1, 3]
    log.extend(batch([9], [1], (2, 1, 3)))
    assert [log.tokens(s) for s in range(3)] == [[5, 7], [6, 9], [5, 7, 8]]
    assert [log.last_row(s) for s in range(3)] == [None, 0, None]
    tokens = log.tokens(0)
    assert tokens is not None
    tokens.append(1)
    assert log.tokens(0) == [5, 7]


def test_tails_can_be_forgotten_and_other_parts_spoil_it():
    log = history(1, 2, 3, 4)
    log.remove(0, 3, END)
    log.remove(0, 9, END)
    log.remove(0, 2, 1)
    assert log.tokens(0) == [1, 2, 3]
    log.remove(0, 1, 3)
    assert log.tokens(0) == [1]
    log.remove(0, 0, END)
    assert log.tokens(0) == []
    for p0, p1 in ((0, 2), (1, 2)):
        log = history(1, 2, 3)
        log.remove(0, p0, p1)
        assert log.tokens(0) is None
        log.remove(0, 0, 1)  # which is not all of it
        assert log.tokens(0) is None


def test_a_spoiled_sequence_is_one_again_when_it_begins_anew():
    log = history(1, 2, 3)
    log.spoil(0)
    assert log.tokens(0) is None and log.last_row(0) is None
    log.extend(batch([4], n_past=(3, 0, 0)))
    assert log.tokens(0) is None
    log.remove(0, 0, END)
    log.extend(batch([7, 8]))
    assert log.tokens(0) == [7, 8]


def test_embeddings_are_no_tokens():
    log = history(1)
    log.extend(batch(embd=np.zeros((2, 2)), seq_id=[0, 1], n_past=(1, 0, 0)))
    assert [log.tokens(s) for s in range(3)] == [None, None, []]


def test_copies():
    log = history(1, 2, 3)
    log.copy(0, 1, 0, END)
    log.copy(0, 2, 0, 2)
    assert [log.tokens(s) for s in range(3)] == [[1, 2, 3], [1, 2, 3], [1, 2]]
    assert [log.last_row(s) for s in range(3)] == [2, 2, None]
    log.extend(batch([9], [1], (3, 3, 2)))
    assert log.tokens(0) == [1, 2, 3]
    log.copy(0, 1, 1, END)
    assert log.tokens(1) is None
    log.spoil(0)
    log.copy(0, 2, 0, END)
    assert log.tokens(2) is None


def test_loading_and_clearing():
    log = history(1, 2)
    log.set(0, None)
    log.set(1, [4, 5])
    assert [log.tokens(s) for s in range(3)] == [None, [4, 5], []]
    log.set_last_rows({1: 6})
    assert [log.last_row(s) for s in range(3)] == [None, 6, None]
    log.clear()
    assert [log.tokens(s) for s in range(3)] == [[], [], []] and log.last_row(1) is None
