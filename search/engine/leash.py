"""Run a command on a leash: when the process that asked for it dies, the command and all that it started die too.

    python -m search.engine.leash PARENT_PID COMMAND …      (started by search.engine.group)

The kernel tells a process of its parent's death, but not a grandchild: an engine's helpers would live on and keep the
GPU. The leash leads the process group and stays beside the command for that one message.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(sign: int) -> None:
    """Ask the kernel to send this process `sign` when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, sign)


def _end_the_group(*_: object) -> None:
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the command and end as it ended: with its exit code, or by its signal."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGHUP, _end_the_group)
    die_with_parent(signal.SIGHUP)
    if os.getppid() != parent:  # it died before it could be asked about
        sys.exit(1)
    for sign in (signal.SIGINT, signal.SIGTERM):  # the command gets them itself, as a member of the group
        signal.signal(sign, signal.SIG_IGN)
    process = subprocess.Popen(command, close_fds=False, preexec_fn=_let_go)
    code = process.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _let_go() -> None:
    """In the command's process, before it starts: it hears signals, and dies with the leash."""
    for sign in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL)


if __name__ == "__main__":
    main()
