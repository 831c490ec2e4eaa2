"""Ctrl-C as a flag."""

from __future__ import annotations

import signal
import threading

import pytest

from cohort.system.interrupt import InterruptFlag


def test_ctrl_c_sets_the_flag_and_the_third_one_interrupts():
    flag = InterruptFlag()
    former = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), flag:
        assert not flag.is_set
        signal.raise_signal(signal.SIGINT)
        assert flag.is_set
        signal.raise_signal(signal.SIGINT)
        assert flag.count == 2
        signal.raise_signal(signal.SIGINT)
    assert flag.is_insistent and signal.getsignal(signal.SIGINT) is former
    with flag:
        assert not flag.is_set


def test_other_threads_install_nothing():
    seen = []

    def work():
        with InterruptFlag():
            seen.append(signal.getsignal(signal.SIGINT))

    former = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [former]
