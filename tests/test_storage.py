"""Optuna's storage as searchers share it, against Optuna's own on the same database."""

from functools import partial

import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState
from sqlalchemy import Engine, event
from test_study import Silent

from search.objectives import DEFAULT
from search.recovery import open_study
from search.spec import read_study
from search.storage import ask, end_trial, shared_storage
from search.store import full_url, open_engine
from search.study import search

RANGES = {"sliding_window": IntDistribution(16, 512, step=4), "num_speculative_tokens": IntDistribution(0, 10)}


@pytest.fixture
def study(database_url):
    return open_study(database_url, "s", open_engine(database_url), DEFAULT)


def as_optuna_has_it(url, name="s"):
    return optuna.load_study(study_name=name, storage=full_url(url)).get_trials()


def end(study, trial, state, values=None, constraint=0.1):
    end_trial(study, trial._trial_id, state, values, {"card": "a"}, {"constraints:ppl": constraint})


def test_what_samplers_read_is_what_optuna_has(study, database_url):
    study.enqueue_trial({"sliding_window": 64, "num_speculative_tokens": 3})
    trials = [ask(study, lambda _: RANGES) for _ in range(4)]
    end(study, trials[0], TrialState.COMPLETE, [100.0, 2.5], -0.2)
    end(study, trials[1], TrialState.PRUNED)
    study.tell(trials[2], state=TrialState.FAIL)
    ours, theirs = study.get_trials(deepcopy=False), as_optuna_has_it(database_url)
    assert [t.state.name for t in ours] == ["COMPLETE", "PRUNED", "FAIL", "RUNNING"]
    for mine, optunas in zip(ours, theirs, strict=True):
        assert mine == optunas
    assert ours[0].params == {"sliding_window": 64, "num_speculative_tokens": 3}
    assert ours[0].constraints == {"ppl": -0.2}
    assert ours[0].user_attrs == {"card": "a"}


def test_a_trial_that_has_ended_keeps_what_it_was_told_first(study, database_url):
    trial = ask(study, lambda _: RANGES)
    end(study, trial, TrialState.COMPLETE, [100.0, 2.5])
    with pytest.raises(UpdateFinishedTrialError):
        end(study, trial, TrialState.PRUNED, constraint=0.7)
    (found,) = as_optuna_has_it(database_url)
    assert found.state == TrialState.COMPLETE and found.constraints == {"ppl": 0.1}


def test_a_study_that_was_made_elsewhere_is_asked_and_told_too():
    study = optuna.create_study(directions=["maximize", "minimize"])
    trial = ask(study, lambda _: RANGES)
    end(study, trial, TrialState.COMPLETE, [100.0, 2.5])
    (found,) = study.get_trials()
    assert set(found.params) == set(RANGES) and found.constraints == {"ppl": 0.1} and found.user_attrs == {"card": "a"}


def test_what_was_written_together_is_not_there_when_it_broke_off(study, database_url):
    trial = study.ask()

    def broken_off():
        with shared_storage(study).together():
            trial.suggest_int("sliding_window", 16, 512)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken_off()
    assert as_optuna_has_it(database_url)[0].params == {}
    trial = ask(study, lambda _: RANGES)  # and nothing is left open
    assert as_optuna_has_it(database_url)[1].params == trial.params


def test_a_trial_of_another_searcher_is_seen_by_the_next_ask(study, database_url):
    other = open_study(database_url, "s", open_engine(database_url), DEFAULT)
    theirs = ask(other, lambda _: RANGES)
    seen = []

    class Looking(optuna.samplers.RandomSampler):
        def infer_relative_search_space(self, study, trial):
            seen.append({t.number: t.params for t in study.get_trials(deepcopy=False)})
            return {}

    study.sampler = Looking()
    ask(study, lambda _: RANGES)
    assert seen[0][theirs.number] == theirs.params
    end(other, theirs, TrialState.COMPLETE, [100.0, 2.5])
    assert study.get_trials(deepcopy=False)[theirs.number].values == [100.0, 2.5]


def test_a_trial_is_a_dozen_transactions_at_most(study_folder, options, database_url, tmp_path, monkeypatch):
    """Each is waited for by a disk, and each holds locks that others wait for."""
    monkeypatch.chdir(tmp_path)
    counts = {"commit": 0, "statement": 0}

    def commit(connection):
        counts["commit"] += not connection.get_execution_options().get("reading")

    def statement(*_):
        counts["statement"] += 1

    asked = partial(options, storage=database_url, sampler="random")
    search(read_study(study_folder), asked(5), Silent())
    event.listen(Engine, "commit", commit)
    event.listen(Engine, "before_cursor_execute", statement)
    try:
        search(read_study(study_folder), asked(45), Silent())
    finally:
        event.remove(Engine, "commit", commit)
        event.remove(Engine, "before_cursor_execute", statement)
    assert counts["commit"] <= 12 * 40 and counts["statement"] <= 85 * 40
