"""The contract of the store, on SQLite and on PostgreSQL."""

import sqlite3
import threading
import time

import pytest

from search.errors import SearchError, UsageError
from search.gate import RecordScore
from search.store import Confirmation, Environment, Outcome, Store, open_engine, safe_url, setting_key


@pytest.fixture
def url(database_url):
    return database_url


@pytest.fixture
def store(url):
    return Store(open_engine(url), "s")


def outcome(trial, state="COMPLETE", tps=100.0, ppl=2.0, window=512, reused_from=None):
    setting = {"sliding_window": window}
    return Outcome(
        study="s",
        trial=trial,
        state=state,
        setting=setting,
        setting_key=setting_key(setting),
        ppl=ppl,
        ceiling=2.42,
        tps=tps,
        tps_low=tps and tps * 0.99,
        tps_high=tps and tps * 1.01,
        prompts=8,
        reused_from=reused_from,
        reason=None,
        wall_s=1.0,
        simulated=True,
    )


def test_a_study_must_stay_what_it_was(store):
    store.define({"gate.ceiling": {"ppl": 2.42}, "engine.model": "m"}, {})
    store.define({"gate.ceiling": {"ppl": 2.42}, "engine.model": "m"}, {})
    with pytest.raises(UsageError, match=r'gate.ceiling = \{"ppl": 2.42\}, now it is \{"ppl": 2.5\}'):
        store.define({"gate.ceiling": {"ppl": 2.5}, "engine.model": "m"}, {})
    store.check_definition({"gate.ceiling": {"ppl": 2.5}, "engine.model": "m"}, ignore=("gate.ceiling",))


def test_the_front_follows_every_outcome(store):
    store.finish(outcome(0, tps=100, ppl=2.0, window=256))
    store.finish(outcome(1, tps=120, ppl=2.2, window=192))
    store.finish(outcome(2, tps=110, ppl=2.3, window=160))  # beaten by 1
    store.finish(outcome(3, state="PRUNED", tps=None, ppl=2.6, window=64))
    assert [p.trial for p in store.front()] == [0, 1]
    store.finish(outcome(4, tps=130, ppl=1.9, window=320))  # beats all
    assert [p.trial for p in store.front()] == [4]
    assert store.best().trial == 4


def test_a_setting_that_is_measured_again_stands_as_it_was_measured_last(store):
    store.finish(outcome(0, tps=120, ppl=2.2, window=192))
    store.finish(outcome(1, tps=120, ppl=2.2, window=192, reused_from=0))
    store.finish(outcome(2, tps=110, ppl=2.2, window=192))  # on more prompts: the first was lucky
    assert [(p.trial, p.tps) for p in store.front()] == [(2, 110)]
    assert store.measured({"sliding_window": 192}).trial == 2


def test_two_studies_in_one_database_do_not_mix(store, url):
    other = Store(open_engine(url), "other")
    store.finish(outcome(0))
    assert other.outcomes() == [] and other.front() == [] and other.best() is None


def test_scores_are_remembered_once(store):
    store.remember_scores("key", {"a": RecordScore(1.0, 2)})
    store.remember_scores("key", {"a": RecordScore(9.0, 9), "b": RecordScore(3.0, 4)})
    assert store.remembered_scores("key") == {"a": RecordScore(1.0, 2), "b": RecordScore(3.0, 4)}
    assert store.remembered_scores("other") == {}


def test_a_setting_is_found_again_but_not_through_a_reuse_or_a_failure(store):
    store.finish(outcome(0, state="FAIL", tps=None, ppl=None))
    assert store.measured({"sliding_window": 512}) is None
    store.finish(outcome(1))
    store.finish(outcome(2, reused_from=1))
    assert store.measured({"sliding_window": 512}).trial == 1


def test_slots_add_up_to_the_total_however_many_searchers_ask(url):
    Store(open_engine(url), "s")
    taken = []

    def ask():
        mine = Store(open_engine(url), "s")
        while (slot := mine.take_slot(40, "host 1 1")) is not None:
            taken.append(slot)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(40))


def test_a_freed_slot_is_given_out_again_but_a_finished_one_is_not(store):
    assert [store.take_slot(2, "o"), store.take_slot(2, "o"), store.take_slot(2, "o")] == [0, 1, None]
    store.finish(outcome(0), slot=0)
    store.free_unfinished_slot(0)
    store.free_unfinished_slot(1)
    assert (store.take_slot(2, "o"), store.finished()) == (1, 1)


def test_a_database_locked_by_another_program_is_waited_for(tmp_path):
    store = Store(open_engine(f"sqlite:///{tmp_path}/s.db"), "s")
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    threading.Timer(1.5, lambda: other.execute("COMMIT")).start()
    started = time.monotonic()
    store.finish(outcome(0))
    assert time.monotonic() - started > 1.0
    assert store.outcome(0) is not None


def test_a_database_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(SearchError, match="cannot be written"):
        open_engine(f"sqlite:///{tmp_path}/no/such/folder/study.db")
    with pytest.raises(UsageError, match="not a database URL"):
        open_engine("study.db")
    with pytest.raises(SearchError, match="There is no study database"):
        open_engine(f"sqlite:///{tmp_path}/absent.db", must_exist=True)


def test_a_password_is_not_shown():
    assert "secret" not in safe_url("postgresql://user:secret@host/db")


def test_the_winner_has_the_best_lower_bound_not_the_best_draw(store):
    def confirm(trial, mean, low, eligible=True):
        row = Confirmation(trial=trial, study="s", setting={}, eligible=eligible, mean=mean, low=low, figures={})
        store.add_confirmation(row)

    assert store.winner() is None
    confirm(7, mean=103.0, low=95.0)
    confirm(9, mean=100.0, low=99.0)
    confirm(4, mean=120.0, low=119.0, eligible=False)
    assert store.winner().trial == 9
    assert [c.trial for c in store.confirmations()] == [9, 7, 4]
    confirm(9, mean=90.0, low=89.0)  # measured again: replaced
    assert store.winner().trial == 7


def test_an_environment_takes_facts_that_are_known_later(store):
    hashes = {"model_hash": "a", "drafter_hash": None, "build_hash": "b"}
    row = Environment(study="s", simulated=False, native={}, facts={"gpu_name": "H200"}, start_s=1.0, **hashes)
    number = store.add_environment(row)
    store.add_facts(number, {"gpu_temperature_c_at_end": 61})
    store.add_facts(number + 1, {"gpu_temperature_c_at_end": 99})  # there is none: nothing to add to, nothing lost
    assert [e.facts for e in store.environments()] == [{"gpu_name": "H200", "gpu_temperature_c_at_end": 61}]


def test_exports_are_kept_in_order(store, tmp_path):
    for name in ("first", "second"):
        store.add_export(3, tmp_path / name, {"name": name})
    assert [(e.trial, e.manifest["name"], e.folder) for e in store.exports()] == [
        (3, "first", str(tmp_path / "first")),
        (3, "second", str(tmp_path / "second")),
    ]
