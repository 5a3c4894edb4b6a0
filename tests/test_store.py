"""The contract of the store, on SQLite and on PostgreSQL."""

import sqlite3
import threading
import time

import pytest

from search.answers import Answer
from search.errors import LostClaimError, SearchError, UsageError
from search.gate import RecordScore
from search.store import (
    REFERENCE,
    Confirmation,
    Environment,
    Measurement,
    Outcome,
    Store,
    open_engine,
    safe_url,
    setting_key,
)


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


def test_the_references_distributions_are_kept_and_found_by_its_measurement(store):
    scores = {"a": RecordScore(1.0, 2, 2, 0.0, b"\0\xff"), "b": RecordScore(2.0, 3, 1, 0.5)}
    store.remember_scores("key", scores)
    assert store.remembered_scores("key") == scores
    assert store.reference_distributions() == {}
    hashes = {"model_hash": "m", "drafter_hash": None, "build_hash": "b"}
    environment = Environment(study="s", simulated=True, native={}, facts={}, start_s=1.0, **hashes)
    common = {"environment_id": store.add_environment(environment), "setting": {}, "effective": {}, "wall_s": 1.0}
    row = {"study": "s", "trial": REFERENCE, "stage": "gate", "status": "done", "figures": {"scores": "key"}}
    store.add_all([Measurement(**row, **common)])
    assert store.reference_distributions() == {"a": b"\0\xff"}


def test_answers_are_remembered_once_without_what_a_database_cannot_hold(store):
    store.remember_answers("key", {"t": Answer("a\0b", True)})
    store.remember_answers("key", {"t": Answer("other", False), "u": Answer("x" * 900, False)})
    assert store.remembered_answers("key") == {"t": Answer("ab", True), "u": Answer("x" * 500, False)}
    assert store.remembered_answers("other") == {}


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

    def ask(owner):
        mine = Store(open_engine(url), "s")
        while (slot := mine.take_slot(40, owner)) is not None:
            mine.claim(slot, owner, slot, f"setting {slot}")
            taken.append(slot)

    threads = [threading.Thread(target=ask, args=[f"host {pid} 1"]) for pid in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(40))


def test_a_freed_slot_is_given_out_again_but_a_finished_one_is_not(store):
    assert [store.take_slot(2, "a"), store.take_slot(2, "b"), store.take_slot(2, "c")] == [0, 1, None]
    store.claim(0, "a", 0, "x")
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


def test_a_setting_is_claimed_by_one_searcher_at_a_time(store):
    for slot, owner in enumerate("abc"):
        assert store.take_slot(3, owner) == slot
    assert store.claim(0, "a", 10, "x") is None
    assert store.claim(1, "b", 11, "x") == 10
    assert [slot.trial for slot in store.slots()] == [10, None, None]  # b's place is not that trial's: it asks again
    assert store.claim(1, "b", 12, "y") is None
    store.finish(outcome(10), slot=0)
    assert store.claim(2, "c", 13, "y", wait=True) == 12  # holds the place, and waits
    assert [slot.trial for slot in store.slots()] == [12, 13]
    assert store.claim(2, "c", 14, "x") is None  # it stands measured, and can be reused


def test_a_place_is_taken_once_though_the_answer_was_lost_on_the_way(store):
    assert (store.take_slot(5, "a"), store.take_slot(5, "a"), store.take_slot(5, "b")) == (0, 0, 1)


def test_a_place_is_taken_over_by_one_heir_and_its_late_outcome_is_refused(store):
    store.take_slot(3, "dead")
    store.claim(0, "dead", 4, "x")
    assert [store.take_over(0, "dead", heir) for heir in ("a", "b")] == [True, False]
    with pytest.raises(LostClaimError, match="Trial 4 was given back"):
        store.claim(0, "dead", 4, "y")
    store.free_unfinished_slot(0)
    store.take_slot(3, "a")
    store.claim(0, "a", 7, "x")
    with pytest.raises(LostClaimError):
        store.finish(outcome(4), slot=0)
    store.finish(outcome(7), slot=0)
    assert [o.trial for o in store.outcomes()] == [7]


def test_the_reference_is_in_one_searchers_hands(store):
    assert [store.claim_reference(owner) for owner in "aba"] == ["a", "a", "a"]
    assert store.finished() == 0 and store.take_slot(1, "b") == 0  # it is none of the places
    store.free_unfinished_slot(-1)
    assert store.claim_reference("b") == "b"


def test_a_lease_is_as_old_as_its_last_renewal_and_ends_with_its_searcher(store):
    store.searcher_started("host 1 1", "searcher 0")
    store.searcher_started("host 2 1", "searcher 1")
    time.sleep(2.1)
    store.renew("host 2 1")
    leases = store.leases()
    assert leases["host 1 1"] >= 2 > leases["host 2 1"] >= 0  # SQLite's clock shows whole seconds
    store.searcher_started("host 3 1", "searcher 0")  # Ray started it again, elsewhere
    assert set(store.leases()) == {"host 2 1", "host 3 1"}
    store.searchers_ended(["searcher 0", "searcher 1"])
    assert store.leases() == {}


def test_rows_that_were_written_are_not_written_again(store):
    hashes = {"model_hash": "a", "drafter_hash": None, "build_hash": "b"}
    row = Environment(study="s", simulated=False, native={}, facts={}, start_s=1.0, **hashes)
    where = {"study": "s", "trial": 3, "environment_id": store.add_environment(row), "stage": "gate", "status": "done"}
    rows = [Measurement(**where, setting={}, effective={}, figures={"n": n}, wall_s=1.0) for n in (1, 2)]
    store.add_all(rows[:1])
    again = Measurement(**where, setting={}, effective={}, figures={"n": 1}, wall_s=1.0, created_at=rows[0].created_at)
    store.add_all([again, rows[1]])
    assert [m.figures["n"] for m in store.measurements("gate", "done")] == [1, 2]


def test_a_rival_is_looked_for_on_the_same_card(store):
    for trial, (card, tps) in enumerate((("a", 100.0), ("b", 120.0), (None, 90.0))):
        found = outcome(trial, tps=tps, window=trial)
        found.card = card
        store.finish(found)
    assert [store.fastest_within(2.0, card) for card in ("a", "b", "c")] == [0, 1, 2]
