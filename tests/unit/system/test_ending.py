"""Signals that end a program in order."""

from __future__ import annotations

import signal

import pytest

from cohort.system.ending import EndSignals


def test_a_signal_raises_an_exit_with_its_code():
    former = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, EndSignals():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143 and signal.getsignal(signal.SIGTERM) is former


def test_a_signal_that_is_held_waits():
    with EndSignals() as ends:
        ends.leave()
        with ends.hold():
            signal.raise_signal(signal.SIGHUP)
            assert ends.code == 129
        with pytest.raises(SystemExit, match="129"):
            ends.leave()


def test_a_signal_that_is_ignored_stays_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with EndSignals() as ends:
            signal.raise_signal(signal.SIGHUP)
        assert ends.code == 0
    finally:
        signal.signal(signal.SIGHUP, former)
