"""Holding a Ctrl-C back until what it must not strike is done."""

import signal
import threading

import pytest

from minfer_jax.interrupts import interrupt_deferred


@pytest.fixture(autouse=True)
def pythons_own_handler():
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_the_block_is_finished_first():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupt_deferred():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_ctrl_c_nothing_happens():
    with interrupt_deferred():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_passes_and_the_handler_is_back():
    with pytest.raises(ValueError), interrupt_deferred():
        raise ValueError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_is_left_alone():
    caught = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    with interrupt_deferred():
        signal.raise_signal(signal.SIGINT)
        assert caught == [signal.SIGINT]


def test_other_threads_have_no_interrupts_to_hold_back():
    ran = []

    def work():
        with interrupt_deferred():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran
