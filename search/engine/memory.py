"""The most memory that this process has held at once, as Linux counts it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): the peak resident set starts anew from what is resident now


def forget_peak() -> None:
    """Let the peak count from now on; where that is not allowed it counts from the start of the process."""
    with suppress(OSError):
        CLEAR.write_text(RESET_PEAK)


def peak_bytes() -> int | None:
    """Bytes of the largest resident set since the peak was forgotten; None where the system does not say."""
    with suppress(OSError, ValueError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return None
