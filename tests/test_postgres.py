"""Searches whose database is a real PostgreSQL server, also when that goes away in the middle."""

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy import create_engine
from test_study import Silent

from search.errors import SearchError
from search.spec import read_study
from search.store import Store, full_url, open_engine
from search.study import search


@pytest.fixture
def url(postgres):
    postgres.psql("DROP DATABASE IF EXISTS search WITH (FORCE)")
    postgres.psql("CREATE DATABASE search")
    return postgres.get_uri("search")


@pytest.fixture
def asked(options, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the spool is, beside no file
    return options(12, storage=url)


def end_every_connection(url):
    """What a restarted server or a cut network leaves: connections that are no more."""
    engine = create_engine(full_url(url), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        )
    engine.dispose()


def check(url, summary):
    assert summary.counts["complete"] + summary.counts["pruned"] == 12
    trials = optuna.load_study(study_name="synthetic-simulated", storage=full_url(url)).get_trials()
    assert len([t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]) == 12
    assert not [t for t in trials if t.state == TrialState.RUNNING]
    store = Store(open_engine(url), "synthetic-simulated")
    for outcome in store.outcomes():
        if outcome.state == "COMPLETE" and outcome.reused_from is None:
            assert len(store.measurements("speed", "done", outcome.trial)) == 1


def test_a_search_on_postgresql_finishes(study_folder, asked, url):
    check(url, search(read_study(study_folder), asked, Silent()))


def test_connections_that_were_cut_are_made_again(study_folder, asked, url):
    observer, cut = Silent(), []

    def on_stage(trial, stage, done):
        if trial == 5 and not cut:
            cut.append(True)
            end_every_connection(url)

    observer.on_stage = on_stage
    check(url, search(read_study(study_folder), asked, observer))
    assert cut


def test_what_a_lost_server_did_not_take_waits_and_is_taken_in(
    study_folder, asked, url, postgres, tmp_path, monkeypatch
):
    observer = Silent()
    monkeypatch.setattr("search.store.patience.PATIENCE_S", 0.5)

    def on_stage(trial, stage, done):
        if trial >= 5 and stage == "speed" and done == 5:
            postgres.psql("ALTER DATABASE search ALLOW_CONNECTIONS false")
            end_every_connection(postgres.get_uri("postgres"))
            observer.on_stage = None

    observer.on_stage = on_stage
    with pytest.raises(SearchError, match=r"cannot be written .* kept in .*synthetic-simulated.spool"):
        search(read_study(study_folder), asked, observer)
    postgres.psql("ALTER DATABASE search ALLOW_CONNECTIONS true")
    again = Silent()
    check(url, search(read_study(study_folder), asked, again))
    assert any("Taken in from the spool: 1" in note for note in again.notes)
    assert not list(tmp_path.glob("*.spool*"))
