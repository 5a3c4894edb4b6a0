"""Rows that name a process: is it this one, another, or one that is gone?"""

import os
import subprocess
import sys

from search.owner import on_this_host, owner_lives, owner_name


def test_this_process_lives_and_one_that_ended_does_not():
    assert owner_lives(owner_name())
    said = subprocess.run(
        [sys.executable, "-c", "from search.owner import owner_name; print(owner_name())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert on_this_host(said) and not owner_lives(said)


def test_a_pid_that_is_used_again_is_another_process():
    host, _, _ = owner_name().rsplit(" ", 2)
    assert not owner_lives(f"{host} {os.getpid()} an-earlier-boot/1")


def test_a_process_of_another_host_is_taken_to_live():
    assert owner_lives("another-host 1 boot/1") and not on_this_host("another-host 1 boot/1")
