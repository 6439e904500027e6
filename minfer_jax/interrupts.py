"""Ctrl-C where it must not strike: between a donation and the rebinding of what comes back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Hold a Ctrl-C back until the block is done, and only then raise `KeyboardInterrupt`.

    Only Python's own handler raises in the middle of things, and only in the main thread; a
    handler that somebody else has installed is left alone.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    caught: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if caught:
        raise KeyboardInterrupt
