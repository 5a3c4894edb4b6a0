"""Ctrl-C and SIGTERM, once and twice, and while Python is stuck in C."""

import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

BODY = """
import signal, sqlite3, sys, time
from search.interrupt import interruptible
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    with interruptible():
        print("up", flush=True)
        {inside}
except KeyboardInterrupt:
    print("clean", flush=True)
    {after}
    sys.exit(130)
"""


def start(inside, after="pass"):
    code = BODY.format(inside=inside, after=after)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_it_cleanly(sign):
    process = start("time.sleep(60)")
    process.send_signal(sign)
    assert process.communicate(timeout=10) == ("clean\n", None)
    assert process.returncode == 130


def test_the_second_signal_ends_it_at_once():
    inside = "try:\n            time.sleep(60)\n        except KeyboardInterrupt:\n            time.sleep(60)"
    process = start(inside)
    time.sleep(0.5)  # until it is inside the try
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[0] == ""
    assert process.returncode == 130 and time.monotonic() - started < 1


def test_a_database_that_waits_for_a_lock_does_not_hold_it_beyond_ten_seconds(tmp_path):
    file = tmp_path / "s.db"
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    process = start(f"sqlite3.connect({str(file)!r}, timeout=100).execute('CREATE TABLE t (x)')")
    time.sleep(1)  # until it is inside SQLite
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=15) == 130
    assert 5 < time.monotonic() - started < 10
    other.close()


def test_handlers_are_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    from search.interrupt import interruptible

    def interrupted():
        with interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert signal.getsignal(signal.SIGTERM) == before
    with interruptible():  # and the grace of the first is over
        time.sleep(0.1)
