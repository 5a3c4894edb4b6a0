"""The version of our tables in a database: made where there are none, brought up to date where they are old."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy
from sqlalchemy import inspect, text

from search.errors import UsageError

VERSION_TABLE = "pareto_version"  # Optuna's own version stands beside it under Alembic's usual name
FIRST, HEAD = "0001", "0006"


def bring_up_to_date(connection: sqlalchemy.Connection) -> None:
    """Make or migrate our tables, inside the connection's transaction, which no other searcher's crosses.

    Raises:
        UsageError: a newer release wrote them.
    """
    found = _version(connection)
    if found == HEAD:
        return
    if found is not None and found > HEAD:
        raise UsageError(
            f"The study database was written by a newer vllm-pareto (its tables are version {found}, this release "
            f"knows {HEAD}): update vllm-pareto, or use another --storage."
        )
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    if found is None and inspect(connection).has_table("pareto_definition"):  # from before versions were kept
        command.stamp(config, FIRST)
    command.upgrade(config, "head")


def _version(connection: sqlalchemy.Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    return found
