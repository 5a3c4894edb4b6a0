"""A database server that does not answer for a while is waited for: a restart or a cut network costs time, no more."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy.exc import DBAPIError, OperationalError, PendingRollbackError

T = TypeVar("T")
P = ParamSpec("P")


class Noting(Protocol):
    """Whatever has a `note`."""

    note: Callable[[str], None]


S = TypeVar("S", bound=Noting)
PATIENCE_S = 150.0  # from the first sign that a server does not answer
PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # between two attempts


def server_lost(error: BaseException | None) -> bool:
    """Whether a database server could not be reached, or ended a connection; never so for an SQLite file."""
    while error is not None:
        if isinstance(error, PendingRollbackError):  # what Optuna's session says after an error; the next try shows it
            return True
        if isinstance(error, DBAPIError):
            of_a_server = "sqlite" not in type(error.orig).__module__
            return of_a_server and (error.connection_invalidated or isinstance(error, OperationalError))
        error = error.__cause__
    return False


def patiently(call: Callable[[], T], note: Callable[[str], None]) -> T:
    """The result of `call`, which is made again while the database server is away; `note` is told once.

    Raises:
        Exception: whatever `call` raised, when it is no such error or the server stays away for PATIENCE_S.
    """
    deadline, pause = float("inf"), PAUSE_S
    while True:
        try:
            return call()
        except Exception as error:
            if not server_lost(error) or time.monotonic() > deadline:
                raise
            if deadline == float("inf"):
                deadline = time.monotonic() + PATIENCE_S
                note(f"The database server does not answer; it is waited for, up to {PATIENCE_S:.0f} s.")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def patient(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method of an object with a `note`, made patient; it may be carried out twice."""

    @functools.wraps(method)
    def patient_method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return patiently(lambda: method(self, *args, **kwargs), self.note)

    return patient_method
