"""A searcher's lease in the study database: while it is renewed, what the searcher has claimed is nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy.exc import SQLAlchemyError

from search.owner import owner_name
from search.store import Store

RENEW_S = 20.0


@contextmanager
def lease(store: Store, name: str) -> Iterator[None]:
    """Inside, this process is a searcher at work: one of `name` that was at work before it is not any more.

    A thread renews the lease. While the database cannot be reached it is not renewed, and nobody else can see that.
    """
    owner, ended = owner_name(), threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_S):
            with suppress(SQLAlchemyError):
                store.renew(owner)

    store.searcher_started(owner, name or owner)
    threading.Thread(target=renew, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        with suppress(SQLAlchemyError):  # then the lease runs out
            store.searchers_ended([name or owner])
