"""Databases of earlier and later releases."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

from search.errors import UsageError
from search.store import Outcome, Store, open_engine
from search.store.models import Base
from search.store.schema import FIRST, HEAD, VERSION_TABLE, bring_up_to_date


@pytest.fixture
def file(tmp_path):
    return tmp_path / "study.db"


def version(file):
    with sqlite3.connect(file) as database:
        return database.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()[0]


def first_release(file):
    """A database as the first release wrote it, with one trial."""
    with sqlite3.connect(file) as database:
        open_engine(f"sqlite:///{file}")
        for column in ("failure", "failed_stage", "log", "warning"):
            database.execute(f"ALTER TABLE pareto_outcome DROP COLUMN {column}")
        database.execute("ALTER TABLE pareto_environment DROP COLUMN log")
        cards = *((t, "card") for t in ("environment", "outcome", "front")), ("outcome", "card_tps")
        gates = ("outcome", "gates"), *(("record_score", name) for name in ("top1", "kl", "distributions"))
        figures = ("outcome", "figures"), ("front", "figures")
        for table, column in (*cards, *gates, *figures):
            database.execute(f"ALTER TABLE pareto_{table} DROP COLUMN {column}")
        database.execute("ALTER TABLE pareto_slot DROP COLUMN setting_key")
        database.execute("DROP TABLE pareto_searcher")
        database.execute("DROP TABLE pareto_process")
        database.execute("DROP TABLE pareto_export")
        database.execute("DROP TABLE pareto_task_answer")
        database.execute(f"DROP TABLE {VERSION_TABLE}")
        database.execute(
            "INSERT INTO pareto_outcome "
            "(study, trial, state, setting, setting_key, wall_s, simulated, created_at, ppl) "
            "VALUES ('s', 3, 'PRUNED', '{}', '{}', 1.0, 0, '2026-11-01 00:00:00', 2.5),"
            "('s', 4, 'COMPLETE', '{}', '{}', 1.0, 0, '2026-11-01 00:00:00', 2.5)"
        )
        database.execute(
            "INSERT INTO pareto_measurement "
            "(study, trial, environment_id, stage, status, setting, effective, figures, wall_s, created_at) "
            "VALUES ('s', 4, 1, 'speed', 'done', '{}', '{}', '{\"ttft_s\": 0.5}', 1.0, '2026-11-01 00:00:00')"
        )


def test_the_migrations_make_exactly_the_tables_of_the_models(database_url):
    engine = open_engine(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"include_name": lambda name, kind, _: kind != "table" or name != VERSION_TABLE}
        )
        assert compare_metadata(context, Base.metadata) == []
        assert connection.exec_driver_sql(f"SELECT version_num FROM {VERSION_TABLE}").scalar() == HEAD


def test_searchers_that_start_together_make_the_tables_once(database_url):
    with ThreadPoolExecutor(4) as pool:
        engines = list(pool.map(open_engine, [database_url] * 4))
    assert all(Store(engine, "s").outcomes() == [] for engine in engines)


def test_a_database_of_the_first_release_is_upgraded_with_its_trials(file):
    first_release(file)
    store = Store(open_engine(f"sqlite:///{file}"), "s")
    assert version(file) == HEAD != FIRST
    assert (store.outcome(3).ppl, store.outcome(3).failure) == (2.5, None)
    assert store.outcome(3).figures is None and store.outcome(4).figures["ttft_s"] == 0.5
    store.finish(Outcome(study="s", trial=5, state="FAIL", setting={}, setting_key="{}", wall_s=1.0, simulated=False))
    assert store.orphan_marks() == set()


def test_an_upgrade_that_fails_leaves_the_database_as_it_was(file):
    first_release(file)
    engine = create_engine(f"sqlite:///{file}")
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE pareto_process (mark TEXT)")  # in the way of the migration
    with pytest.raises(Exception, match="already exists"):
        open_engine(f"sqlite:///{file}")
    with engine.connect() as connection:
        columns = {row[1] for row in connection.exec_driver_sql("PRAGMA table_info(pareto_outcome)")}
    assert "failure" not in columns


def test_a_database_of_a_newer_release_is_refused(file):
    open_engine(f"sqlite:///{file}")
    with sqlite3.connect(file) as database:
        database.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(UsageError, match="written by a newer vllm-pareto .* update vllm-pareto"):
        open_engine(f"sqlite:///{file}")


def test_a_database_that_is_up_to_date_is_not_touched(file):
    engine = open_engine(f"sqlite:///{file}")
    before = file.read_bytes()
    with engine.begin() as connection:
        bring_up_to_date(connection)
    assert file.read_bytes() == before
