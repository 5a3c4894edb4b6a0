"""What the database does not take waits in a file, and nothing of it is lost or taken twice."""

import json
import sqlite3

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from test_store import outcome

from search.answers import Answer
from search.errors import SpooledError
from search.gate import RecordScore
from search.store import Environment, Measurement, PromptTimingRow, Spool, Store, open_engine
from search.store.spool import RESERVE_BYTES


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


@pytest.fixture
def engine(url):
    return open_engine(url)


@pytest.fixture
def store(engine, url):
    store = Store(engine, "s", Spool(url, "s"))
    hashes = {"model_hash": "aa", "drafter_hash": None, "build_hash": "cc"}
    store.add_environment(Environment(study="s", simulated=True, native={}, facts={}, start_s=1.0, **hashes))
    return store


def measurement(trial, stage="speed"):
    row = Measurement(study="s", trial=trial, environment_id=1, stage=stage, status="done", setting={"w": 1})
    row.effective, row.figures, row.wall_s = {"w": 1}, {"tps": 100.5}, 0.25
    numbers = {"tokens": 64, "latency_s": 0.125, "drift": 1.01, "drafts": 3, "draft_tokens": 9}
    row.timings = [PromptTimingRow(position=0, prompt="p", output_hash="0f", accepted_per_pos=[2, 1], **numbers)]
    return row


def spoil(engine, pragma):
    """Make SQLite itself refuse to write, on every connection."""

    @event.listens_for(engine, "begin")
    def begin(connection):
        connection.exec_driver_sql(pragma)

    return lambda: (event.remove(engine, "begin", begin), engine.dispose())


@pytest.mark.parametrize(
    ("pragma", "says"), [("PRAGMA query_only = 1", "readonly database"), ("PRAGMA max_page_count = 1", "disk is full")]
)
def test_a_trial_that_the_database_does_not_take_is_taken_in_later(store, engine, pragma, says):
    mend = spoil(engine, pragma)
    trials = iter(range(200))

    def fill():  # until no page is free
        for trial in trials:
            store.finish(outcome(trial), [measurement(trial)])

    with pytest.raises(SpooledError, match=f"{says}.*study.db.s.spool and taken in when the same command"):
        fill()
    mend()
    trial = next(trials) - 1
    done = {o.trial for o in store.outcomes()}
    assert trial not in done
    assert store.take_in_spool() == 1
    assert {o.trial for o in store.outcomes()} == done | {trial}
    (speed,) = store.measurements("speed", "done", trial)
    (timing,) = speed.timings
    assert (speed.figures, timing.latency_s, timing.accepted_per_pos) == ({"tps": 100.5}, 0.125, [2, 1])
    assert store.take_in_spool() == 0


def test_scores_and_rows_without_an_outcome_wait_too(store, engine):
    mend = spoil(engine, "PRAGMA query_only = 1")
    with pytest.raises(SpooledError):
        store.remember_scores("key", {"r": RecordScore(1.5, 3, 2, 0.25, b"\0\xff")})
    with pytest.raises(SpooledError):
        store.add_all([measurement(4, "gate")])
    with pytest.raises(SpooledError):
        store.remember_answers("key", {"t": Answer("42", True)})
    mend()
    assert store.take_in_spool() == 3
    assert store.remembered_scores("key") == {"r": RecordScore(1.5, 3, 2, 0.25, b"\0\xff")}
    assert store.remembered_answers("key") == {"t": Answer("42", True)}
    assert len(store.measurements("gate", "done", 4)) == 1


def test_a_spool_of_an_earlier_release_is_taken_in(store, url):
    line = {"outcome": None, "measurements": [], "slot": None, "gate_key": "key", "scores": {"r": [1.5, 3]}}
    Spool(url, "s").path.write_text(json.dumps(line) + "\n")
    assert store.take_in_spool() == 1
    assert store.remembered_scores("key") == {"r": RecordScore(1.5, 3)}


def test_what_is_spooled_on_an_interrupt_does_not_ask_the_database(store, url):
    other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    store.spool([measurement(2)])
    other.execute("ROLLBACK")
    assert store.take_in_spool() == 1
    assert len(store.measurements("speed", "done", 2)) == 1


def test_a_trial_that_was_stored_after_all_is_not_stored_twice(store, url):
    store.finish(outcome(0), [measurement(0)])
    spool = Spool(url, "s")
    from search.store.spool import Waiting

    spool.keep(Waiting(outcome(0), [measurement(0)], None))
    assert store.take_in_spool() == 1
    assert len(store.measurements("speed", "done", 0)) == 1


def test_what_was_taken_in_before_the_database_failed_again_is_not_taken_in_twice(store, engine):
    for trial in range(3):
        store.spool([measurement(trial)])
    calls = []

    @event.listens_for(engine, "begin")
    def begin(connection):
        calls.append(connection)
        connection.exec_driver_sql(f"PRAGMA query_only = {int(len(calls) > 1)}")

    with pytest.raises(OperationalError, match="readonly"):
        store.take_in_spool()
    event.remove(engine, "begin", begin)
    engine.dispose()
    assert store.take_in_spool() == 2
    assert [len(store.measurements("speed", "done", trial)) for trial in range(3)] == [1, 1, 1]
    assert not list(store._spool.path.parent.glob("*spool*"))


def test_a_line_that_was_cut_off_is_left_out_and_the_others_are_taken(store):
    store.spool([measurement(1)])
    with store._spool.path.open("a") as file:
        file.write('{"outcome": {"study": "s", "tri')
    assert store.take_in_spool() == 1
    assert not store._spool.path.exists()


def test_room_is_kept_for_the_spool_and_given_back(url, tmp_path):
    spool = Spool(url, "s")
    spool.reserve()
    (reserve,) = tmp_path.glob("*reserve*")
    assert reserve.stat().st_size == RESERVE_BYTES
    spool.release()
    assert list(tmp_path.glob("*reserve*")) == []


def test_where_the_folder_is_gone_the_spool_is_elsewhere(tmp_path):
    from search.store.spool import Waiting

    spool = Spool(f"sqlite:///{tmp_path}/gone/study.db", "s")
    path = spool.keep(Waiting(measurements=[measurement(0)]))
    assert not path.is_relative_to(tmp_path)
    (waiting,) = spool.take()
    assert waiting.measurements[0].trial == 0 and not path.exists()
