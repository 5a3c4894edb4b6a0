"""Process groups: on a leash, ended whole, found again by their mark."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from search.engine import gpu
from search.engine.group import MARK, ProcessGroup, end_marked, marked

SLEEP = "import time; time.sleep(600)"
# A command that starts a helper, which leaves the group, and says so.
FORKS = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True);"
    f"print('up'); {SLEEP}"
)
# One whose parent starts a group as the search does, with a helper inside the group, and says its mark.
PARENT = """
import os, sys, time
from pathlib import Path
from search.engine.group import ProcessGroup
group = ProcessGroup([sys.executable, '-uc', {command!r}], Path({log!r}), dict(os.environ), 'test')
print(group._mark, flush=True)
time.sleep(600)
"""


def start(tmp_path, code, **more):
    group = ProcessGroup([sys.executable, "-uc", code], tmp_path / "log", dict(os.environ), "test", **more)
    deadline = time.monotonic() + 20
    while len(group.members()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return group


def wait_until(what, patience_s=10.0):
    deadline = time.monotonic() + patience_s
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert what()


class Ledger(list):
    def process_started(self, mark, what):
        self.append(("started", mark, what))

    def process_ended(self, mark):
        self.append(("ended", mark))


def test_the_end_takes_helpers_that_left_the_group_too_and_the_ledger_hears_of_it(tmp_path):
    ledger = Ledger()
    group = start(tmp_path, FORKS, ledger=ledger)
    wait_until(lambda: len(group.members()) == 3)  # leash, command, helper
    (_, mark, what) = ledger[0]
    assert what == "test" and marked({mark}) == group.members()
    assert group.end() == {}
    assert group.members() == set() and ledger[1:] == [("ended", mark)]
    group.end()


def test_a_command_that_ends_gives_its_exit_code_or_its_signal(tmp_path):
    group = ProcessGroup([sys.executable, "-c", "raise SystemExit(7)"], tmp_path / "a", dict(os.environ), "test")
    assert group.exit_code(20) == 7
    group = start(tmp_path, SLEEP)
    (command,) = group.members() - {group.pid}
    os.kill(command, signal.SIGABRT)
    assert group.exit_code(20) == -signal.SIGABRT


def test_a_stopped_command_is_ended(tmp_path):
    group = start(tmp_path, SLEEP)
    os.killpg(group.pid, signal.SIGSTOP)
    group.end()
    assert group.members() == set()


def test_a_polite_end_lets_the_command_clean_up(tmp_path):
    handler = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('clean'), sys.exit(0)))"
    group = start(tmp_path, f"{handler}; print('up'); {SLEEP}")
    wait_until(lambda: "up" in group.log.read_text())
    group.end(patience_s=10)
    assert group.last_lines()[-1] == "clean"


def test_when_the_parent_is_killed_all_that_it_started_dies(tmp_path):
    command = FORKS.replace(", start_new_session=True", "")
    parent = PARENT.format(command=command, log=str(tmp_path / "log"))
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    mark = process.stdout.readline().strip()
    wait_until(lambda: len(marked({mark})) == 3)
    process.kill()
    process.wait()
    wait_until(lambda: not marked({mark}), 5)


def test_orphans_are_found_and_ended_by_their_mark_alone(tmp_path):
    mine = subprocess.Popen([sys.executable, "-c", SLEEP], env={**os.environ, MARK: "feedfacefeedface"})
    other = subprocess.Popen([sys.executable, "-c", SLEEP], env={**os.environ, MARK: "0123456789abcdef"})
    try:
        wait_until(lambda: marked({"feedfacefeedface"}) == {mine.pid})
        assert end_marked({"feedfacefeedface"})
        assert mine.wait(5) == -signal.SIGKILL and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_gpu_memory_that_is_not_given_back_is_named(monkeypatch):
    used = iter([{"GPU-a": 9 << 30, "GPU-b": 1 << 30}, {"GPU-a": 1 << 30, "GPU-b": 1 << 30}])
    monkeypatch.setattr(gpu, "memory_used", lambda: next(used))
    assert gpu.wait_for_memory({"GPU-a": 1 << 30, "GPU-b": 1 << 30}, patience_s=5) == {}
    monkeypatch.setattr(gpu, "memory_used", lambda: {"GPU-a": 3 << 30})
    assert gpu.wait_for_memory({"GPU-a": 1 << 30}, patience_s=0.3) == {"GPU-a": 2 << 30}


def test_without_an_nvidia_driver_there_is_no_gpu_to_wait_for():
    if Path("/proc/driver/nvidia").exists():
        assert gpu.memory_used()
    else:
        assert gpu.memory_used() == {} and gpu.peak_bandwidth() is None
