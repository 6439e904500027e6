"""Ctrl-C while a model is loaded and run: a request first, an order the second time."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from minfer_jax.cli import INTERRUPTED

_STDERR = 2
_SHOW_CURSOR = b"\x1b[?25h\n"


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """While it lasts, the first Ctrl-C sets the event and the second ends the process at once.

    The main thread reads the event between steps. No `KeyboardInterrupt` is raised, since jax has
    callbacks in which one is lost. A thread watches, because Python calls its signal handlers in
    the main thread, and that may be compiling a graph for a long time.
    """
    asked = threading.Event()
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    thread = threading.Thread(target=_watch, args=(signals, asked), name="ctrl-c", daemon=True)
    thread.start()
    previous_fd = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    previous = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)
        signal.set_wakeup_fd(previous_fd)
        wakeup.close()
        thread.join()
        signals.close()


def _watch(signals: socket.socket, asked: threading.Event) -> None:
    """Read signal numbers, one byte each, until the other end is closed."""
    while number := signals.recv(1):
        if number[0] != signal.SIGINT:
            continue
        if asked.is_set():
            if os.isatty(_STDERR):  # where a progress bar may have hidden it
                os.write(_STDERR, _SHOW_CURSOR)
            os._exit(INTERRUPTED)
        asked.set()
