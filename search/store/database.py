"""Study databases: their URLs, how they are opened, and how searchers take turns in one."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import Engine, create_engine, delete, event, func, select
from sqlalchemy.exc import DisconnectionError, SQLAlchemyError
from sqlalchemy.orm import Session

from search.errors import SearchError, UsageError
from search.secrets import redact
from search.store.models import Definition, Slot
from search.store.schema import bring_up_to_date

BUSY_TIMEOUT_S = 100
CONNECT_TIMEOUT_S, NO_ANSWER_S = 10, 30  # a link that was cut is noticed after so long, by searcher and server
PING_AFTER_S = 1.0
TURN = 0x7061_7265  # "pare": the lock by which searchers on PostgreSQL take turns


def safe_url(url: str) -> str:
    """A database URL without its password, fit to be shown.

    Raises:
        UsageError: `url` is no database URL.
    """
    return _parse(url).render_as_string(hide_password=True)


def full_url(url: str) -> str:
    """A database URL as SQLAlchemy takes it, password and all: postgresql:// is spoken through psycopg.

    Raises:
        UsageError: `url` is no database URL.
    """
    return _parse(url).render_as_string(hide_password=False)


def sqlite_file(url: str) -> Path | None:
    """The file of an SQLite database; None for a server's.

    Raises:
        UsageError: `url` is no database URL.
    """
    parsed = _parse(url)
    return Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None


def _parse(url: str) -> sqlalchemy.URL:
    try:
        parsed = sqlalchemy.make_url(url)
        return parsed.set(drivername="postgresql+psycopg") if parsed.drivername == "postgresql" else parsed
    except sqlalchemy.exc.ArgumentError as error:
        shown = "" if "@" in url else f" {url!r}"  # before an @ there may be a password
        raise UsageError(f"--storage{shown} is not a database URL; write sqlite:///study.db.") from error


def open_engine(url: str, *, must_exist: bool = False) -> Engine:
    """An engine on the study database, with our tables made where they are missing and brought up to date.

    With `must_exist`, an SQLite file that is not there is an error instead of an empty study.

    Raises:
        UsageError: `url` is no database URL, or a newer release wrote the database.
        SearchError: the database cannot be opened or written.
    """
    file = sqlite_file(url)
    if must_exist and file is not None and not file.is_file():
        raise SearchError(f"There is no study database {file}; run python -m search.run first.")
    try:
        engine = create_engine(_parse(url), **engine_options(url))
        _take_turns(engine)
        if engine.dialect.name == "postgresql":
            _look_at_idle_connections(engine)
        with engine.begin() as connection:
            bring_up_to_date(connection)
            connection.execute(delete(Slot).where(Slot.study == ""))  # proves that it can be written
    except (SQLAlchemyError, ImportError) as error:
        raise SearchError(f"The study database {safe_url(url)} cannot be written: {cause_of(error)}.") from error
    return engine


def cause_of(error: Exception) -> str:
    """What a database said, without SQLAlchemy's additions and without secrets."""
    return redact(str(getattr(error, "orig", None) or error).strip().splitlines()[0]).rstrip(".")


def engine_options(url: str) -> dict[str, Any]:
    """How engines on a study database are made: SQLite waits for locks, others notice lost links."""
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": BUSY_TIMEOUT_S}}
    if parsed.get_backend_name() != "postgresql":
        return {"pool_pre_ping": True}  # MySQL, say
    # Without these a searcher behind a cut cable would wait for its answer for a quarter of an hour, and the server
    # would keep its locks as long.
    server = f"-c idle_in_transaction_session_timeout={NO_ANSWER_S}s -c tcp_user_timeout={NO_ANSWER_S}s"
    arguments = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "keepalives_idle": NO_ANSWER_S // 3,
        "keepalives_interval": NO_ANSWER_S // 6,
        "keepalives_count": 4,
        "tcp_user_timeout": NO_ANSWER_S * 1000,
        "options": server,
    }
    arguments = {name: value for name, value in arguments.items() if name not in parsed.query}
    return {"pool_size": 1, "connect_args": arguments}


def optuna_options(url: str, engine: Engine) -> dict[str, Any]:
    """How Optuna's engine on the study database is made: with a server it shares our connection."""
    options = engine_options(url)
    return options if engine.dialect.name == "sqlite" else {"pool": engine.pool}


def _take_turns(engine: Engine) -> None:
    """Make our transactions that write wait for one another from their first statement, so that no two cross.

    They take milliseconds. SQLite begins with its write lock; PostgreSQL with a lock that has no other use. What only
    reads (the execution option `reading`) waits for nobody on PostgreSQL, nor does what writes under locks of its own
    (`alone`): where many searchers share a few cores, whoever holds a lock is seldom the one that runs.
    """
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def leave_transactions_to_us(connection: Any, _record: Any) -> None:
            connection.isolation_level = None

    first = "BEGIN IMMEDIATE" if engine.dialect.name == "sqlite" else f"SELECT pg_advisory_xact_lock({TURN})"

    @event.listens_for(engine, "begin")
    def begin(connection: sqlalchemy.Connection) -> None:
        options = connection.get_execution_options()
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN" if options.get("reading") else first)
        elif not options.get("reading") and not options.get("alone"):
            connection.exec_driver_sql(first)


def _look_at_idle_connections(engine: Engine) -> None:
    """Look whether a connection still stands, before it is used, only where it was idle: a trial uses it 100 times."""

    @event.listens_for(engine, "checkin")
    def checkin(_connection: Any, record: Any) -> None:
        record.info["idle_since"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def checkout(connection: Any, record: Any, _proxy: Any) -> None:
        if time.monotonic() - record.info.get("idle_since", float("inf")) > PING_AFTER_S:
            try:
                engine.dialect.do_ping(connection)
            except engine.dialect.dbapi.Error as error:  # type: ignore[union-attr]
                raise DisconnectionError from error  # the pool opens another


def take_turn(session: Session, what: str) -> None:
    """Inside a transaction on PostgreSQL: wait for others that have taken this turn, until their transactions end."""
    if session.get_bind().dialect.name == "postgresql":
        number = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "big", signed=True)
        session.execute(select(func.pg_advisory_xact_lock(number)))


def study_names(engine: Engine) -> list[str]:
    """The studies that a database holds, in alphabetical order."""
    with engine.connect() as connection:
        return sorted(connection.scalars(select(Definition.study)))
