"""Signals: Ctrl-C is a request first and an order the second time; told to end, we clean up."""

from __future__ import annotations

import os
import signal
import socket
import sys
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
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs beside it
        yield asked
        return
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    thread = threading.Thread(target=_watch, args=(signals, asked), name="ctrl-c", daemon=True)
    thread.start()
    previous_fd = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    previous = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous or signal.SIG_DFL)
        signal.set_wakeup_fd(previous_fd)
        wakeup.close()
        thread.join()
        signals.close()


@contextmanager
def cleaned_up_on_termination() -> Iterator[None]:
    """While it lasts, being told to end (SIGTERM, SIGHUP) unwinds the stack like an exception."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    defaults = [s for s in map(signal.Signals.__getitem__, names) if signal.getsignal(s) == 0]
    for number in defaults:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in defaults:
            signal.signal(number, signal.SIG_DFL)


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
