"""The first Ctrl-C asks, the second ends; both while the main thread is busy in C."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from minfer_jax.cli.interrupt import cleaned_up_on_termination, stop_on_interrupt


def test_the_first_sets_the_event_and_raises_nothing():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as asked:
        assert not asked.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.wait(timeout=10)
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_other_signals_do_not_count():
    seen = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.set())
    try:
        with stop_on_interrupt() as asked:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen.wait(timeout=10)
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGINT)
            assert asked.wait(timeout=10)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_nothing_stays_behind():
    threads = threading.active_count()
    for _ in range(3):
        with stop_on_interrupt():
            assert threading.active_count() == threads + 1
    assert threading.active_count() == threads


_BUSY = """
import hashlib, os, threading, signal
from minfer_jax.cli.interrupt import stop_on_interrupt

def twice(asked):
    os.kill(os.getpid(), signal.SIGINT)
    asked.wait()
    os.kill(os.getpid(), signal.SIGINT)

with stop_on_interrupt() as asked:
    threading.Timer(0.1, twice, [asked]).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)  # minutes, all of them in C
"""


def test_the_second_ends_the_process_though_the_main_thread_is_busy():
    done = subprocess.run([sys.executable, "-c", _BUSY], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"")


def test_being_told_to_end_unwinds_like_an_exception():
    cleaned = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped, cleaned_up_on_termination():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(True)
    assert stopped.value.code == 128 + signal.SIGTERM and cleaned
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_ignored_ctrl_c_stays_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_interrupt() as asked:
            signal.raise_signal(signal.SIGINT)
        assert not asked.is_set() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)
