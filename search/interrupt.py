"""Ctrl-C and SIGTERM: the first ends the search cleanly and soon, the second at once."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

EXIT_CODE = 130
GRACE_S = 8.0  # from the first signal to the end, whatever the search is waiting for
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM raises KeyboardInterrupt; a second one, or GRACE_S, ends the process.

    A thread listens too: Python calls a signal's handler only when the code that it runs in C (a database that waits
    for a lock, say) returns. Workers end with this process in any case.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    heard: list[int] = []

    def handle(sign: int, _frame: object) -> NoReturn:
        heard.append(sign)
        if len(heard) > 1:
            os._exit(EXIT_CODE)
        raise KeyboardInterrupt

    handlers = {sign: signal.signal(sign, handle) for sign in SIGNALS}
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    watch = threading.Thread(target=_watch, args=(read,), daemon=True)
    watch.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for sign, handler in handlers.items():
            signal.signal(sign, handler)
        os.close(write)  # ends the thread
        watch.join()
        os.close(read)


def _watch(read: int) -> None:
    """End the process at the second signal, or when the grace after the first is over; return when the pipe closes."""
    ends_at: float | None = None
    while True:
        left = None if ends_at is None else max(0.0, ends_at - time.monotonic())
        if not select.select([read], [], [], left)[0]:
            os._exit(EXIT_CODE)
        heard = os.read(read, 1)
        if not heard:
            return
        if heard[0] in SIGNALS:
            if ends_at is not None:
                os._exit(EXIT_CODE)
            ends_at = time.monotonic() + GRACE_S
