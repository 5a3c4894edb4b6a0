"""Which process a row of the store belongs to, and whether that process still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def owner_name() -> str:
    """This process, told apart from any other that had or will have its pid."""
    return f"{_host()} {os.getpid()} {_start_time(os.getpid())}"


def on_this_host(owner: str) -> bool:
    """Whether `owner` (see `owner_name`) is or was a process of this host."""
    return owner.rsplit(" ", 2)[0] == _host()


def owner_lives(owner: str) -> bool:
    """Whether the process that `owner_name` named still runs; one on another host is taken to."""
    _, pid, start = owner.rsplit(" ", 2)
    return not on_this_host(owner) or _start_time(int(pid)) == start


def _host() -> str:
    """This host and its process ids: containers may share the host's name, but not those."""
    try:
        return f"{socket.gethostname()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> str:
    """Boot and time (clock ticks since then) at which a process started, or "" if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else f"{boot}/{rest[18]}"
