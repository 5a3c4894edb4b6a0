"""Whole searches on the simulated engine, in a worker process of its own."""

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from search import export
from search.closing import found
from search.engine.protocol import Apply, Decode, Load
from search.engine.simulated import SimulatedEngine
from search.errors import SearchError, UsageError
from search.objectives import DEFAULT
from search.recovery import open_study, recover
from search.spec import read_study
from search.store import REFERENCE, Store, open_engine, setting_key
from search.study import search

NEIGHBOUR = "another-host/1 1 boot/1"  # a searcher elsewhere


class Silent:
    """Hears everything, says nothing; `on_stage` may interrupt."""

    def __init__(self):
        self.notes = []
        self.on_stage = None

    def note(self, text):
        self.notes.append(text)

    def opened(self, finished, total): ...

    def stage(self, trial, setting, stage, done, total):
        if self.on_stage:
            self.on_stage(trial, stage, done)

    def finished(self, outcome, finished, front): ...

    def searched(self, summary): ...


def stored(options):
    return Store(open_engine(options.storage), "synthetic-simulated")


def optuna_trials(options):
    return optuna.load_study(study_name="synthetic-simulated", storage=options.storage).get_trials()


def test_a_search_finishes_its_trials_and_stores_the_front(study_folder, options):
    summary = search(read_study(study_folder), options(100), Silent())
    assert summary.counts["complete"] + summary.counts["pruned"] == 100
    assert summary.counts["pruned"] > 0 and summary.engine_starts == 1
    assert len(summary.front) >= 3
    assert summary.best["ppl"] <= summary.ceiling == pytest.approx(1.05 * summary.reference.ppl)
    assert summary.best["tps"] > 1.5 * summary.reference.tps
    assert summary.as_json()["simulated"] is True
    reference = summary.as_json()["reference"]  # which has no drafts: every token is a step
    assert reference["itl_p95_s"] * reference["tps"] == pytest.approx(1, rel=0.15)
    assert summary.best["itl_p95_s"] > reference["itl_p95_s"]  # drafts come in bursts, after longer steps
    assert "95 % of the gaps between tokens" in "".join(found(summary))
    assert all(o.simulated for o in stored(options(100)).outcomes())


def test_a_prior_that_cannot_be_read_is_said_before_an_engine_starts(study_folder, options):
    with pytest.raises(UsageError, match=r"--prior nowhere.csv cannot be read"):
        search(read_study(study_folder), options(3, prior="nowhere.csv"), Silent())
    assert not list(Path(options(3).logs).glob("*.log"))


def test_simulated_trials_are_not_exported_and_that_is_said(study_folder, options, tmp_path, capsys):
    search(read_study(study_folder), options(3), Silent())
    where = ["--study", str(study_folder), "--storage", options(3).storage, "--out", str(tmp_path / "out")]
    assert export.main([*where, "--unverified"]) == 1
    assert "simulated ones are there, and are not exported" in capsys.readouterr().err


def test_the_defaults_are_the_first_trial_and_the_reference_is_none_of_them(study_folder, options):
    search(read_study(study_folder), options(1), Silent())
    store = stored(options(1))
    assert store.outcome(0).setting == {
        "sliding_window": 512,
        "centroid_top_k": 32,
        "num_speculative_tokens": 4,
    }
    assert store.outcome(REFERENCE).setting["num_speculative_tokens"] == 0
    assert len(optuna_trials(options(1))) == 1


def test_a_pruned_trial_keeps_what_it_measured_and_its_constraint(study_folder, options):
    search(read_study(study_folder), options(40), Silent())
    reference = stored(options(40)).outcome(REFERENCE)
    for trial in optuna_trials(options(40)):
        outcome = stored(options(40)).outcome(trial.number)
        over = true_ppl(trial.params["sliding_window"]) * reference.ppl - outcome.ceiling
        assert trial.constraints["ppl"] == outcome.excess == pytest.approx(over)
        assert (trial.state == TrialState.PRUNED) == (over > 0)
        assert ("ppl" in trial.user_attrs) and ("tps" in trial.user_attrs) == (over <= 0)


def test_a_pruned_trial_is_never_timed(study_folder, options):
    search(read_study(study_folder), options(40), Silent())
    store = stored(options(40))
    pruned = [o.trial for o in store.outcomes() if o.state == "PRUNED"]
    assert pruned
    assert not any(store.measurements("speed", "done", trial) for trial in pruned)


def test_a_drifting_machine_does_not_move_the_figures(study_folder, options, monkeypatch):
    spec = read_study(study_folder)
    search(spec, options(40, sampler="random"), Silent())
    store = stored(options(40))
    rows = [m for m in store.measurements("speed", "done") if m.trial != REFERENCE]
    drifts = [t.drift for m in rows for t in m.timings]
    assert max(drifts) / min(drifts) > 1.15  # the simulated machine swings by ± 10 %

    monkeypatch.setattr("search.engine.simulated.DRIFT", 0.0)
    monkeypatch.setattr("search.engine.simulated.LATENCY_NOISE", 0.0)
    reference = store.outcome(REFERENCE)
    scale = reference.tps / true_tps(spec, reference.setting)
    assert rows
    for row in rows:
        interval = math.log(row.figures["tps_high"] / row.figures["tps_low"]) / 2  # wide after few prompts
        shift = math.log(row.figures["tps"] / (scale * true_tps(spec, row.setting)))
        assert abs(shift) < max(0.06, 1.5 * interval)
    narrow = [row for row in rows if row.figures["tps_high"] / row.figures["tps_low"] < 1.04]
    assert len(narrow) >= 5


def test_a_trial_may_ask_for_more_prompts_than_there_are(edit_study, options):
    folder = edit_study("output_tokens: 64", "output_tokens: 64\n  prompts_per_trial: 100\n  precision: 0.001")
    search(read_study(folder), options(6, sampler="random"), Silent())
    assert max(o.prompts for o in stored(options(6)).outcomes() if o.prompts) == 24  # the study's tune prompts


def test_waves_are_timed_as_prompts_are_and_make_more_tokens_a_second(edit_study, options):
    alone = search(
        read_study(edit_study("max_num_seqs: 1", "max_num_seqs: 4")), options(12, sampler="random"), Silent()
    )
    spec = read_study(edit_study("output_tokens: 64", "output_tokens: 64\n  concurrency: 4"))
    with pytest.raises(UsageError, match="started with workload.concurrency = not set, now it is 4"):
        search(spec, options(12), Silent())
    options = partial(options, storage=options(12).storage.replace("study.db", "waves.db"))
    summary = search(spec, options(12, sampler="random"), Silent())
    rows = [m for m in stored(options(12)).measurements("speed", "done") if m.trial != REFERENCE]
    known = {wave.id for wave in spec.waves()}
    assert rows and {t.prompt for m in rows for t in m.timings} <= known and len(known) == 6
    assert {t.tokens for m in rows for t in m.timings} == {4 * 64}
    assert max(m.figures["prompts"] for m in rows) == 6
    one, four = (s.as_json()["reference"] for s in (alone, summary))  # every step takes longer
    assert all(1.1 < four[name] / one[name] < 1.4 for name in ("ttft_s", "itl_p95_s"))
    assert one["peak_bytes"] < four["peak_bytes"] and one["energy_j"] is None
    assert 2 * alone.reference.tps < summary.reference.tps < 4 * alone.reference.tps


def test_a_trial_that_was_stopped_as_beaten_does_not_overtake_what_beat_it(study_folder, options):
    search(read_study(study_folder), options(60, sampler="random"), Silent())
    outcomes = {o.trial: o for o in stored(options(60)).outcomes()}
    stopped = [
        (o, re.search(r"stopped after \d+ prompts: trial (\d+) is faster", o.reason or "")) for o in outcomes.values()
    ]
    beaten = [(o, outcomes[int(found[1])]) for o, found in stopped if found]
    assert len(beaten) >= 5
    assert all(o.tps < rival.tps and rival.ppl <= o.ppl for o, rival in beaten)


def test_the_default_sampler_asks_on_all_prompts_where_it_says_so(study_folder, options):
    search(read_study(study_folder), options(16, sampler="gated"), Silent())
    store = stored(options(16))
    asked = [t for t in optuna_trials(options(16)) if t.user_attrs.get("on_all_prompts")]
    assert asked and all("on all prompts" in t.user_attrs["why"] for t in asked)
    timed = [store.outcome(t.number) for t in asked]
    assert all(o.prompts == 24 and o.reused_from is None for o in timed if o.state == "COMPLETE")


def test_a_search_with_stop_auto_ends_before_its_trials_and_says_so(study_folder, options):
    observer = Silent()
    summary = search(read_study(study_folder), options(150, sampler="gated", stop_early=True), observer)
    finished = summary.counts["complete"] + summary.counts["pruned"]
    assert finished < 100 and any(f"Stopped after {finished} trials: another one is not" in n for n in observer.notes)
    again = search(read_study(study_folder), options(150, sampler="gated", stop_early=True), Silent())
    assert again.counts == summary.counts  # the same command finds it still not worth it


def true_ppl(window):
    """The simulated perplexity law over the study's records, whose offsets are its own."""
    reference, here = (2.3769 + 0.768 * math.exp(-w / 49.5) for w in (512, window))
    return here / reference


def true_tps(spec, setting):
    """Throughput over all tune prompts on the simulated machine without noise and drift."""
    engine = SimulatedEngine()
    engine.load(Load(model="", drafter="", args={}, limits={"num_speculative_tokens": 10}))
    engine.apply(Apply(setting=setting, probe=[], probe_tokens=0))
    tokens = spec.workload.output_tokens
    decoded = [
        engine.decode(Decode(prompt_id=p.id, prompt=list(p.token_ids), max_tokens=tokens)) for p in spec.prompts()
    ]
    return sum(d.tokens for d in decoded) / sum(d.latency_s for d in decoded)


def test_perplexity_is_scored_once_a_window_and_the_memory_is_proved_once(study_folder, options):
    summary = search(read_study(study_folder), options(60), Silent())
    store = stored(options(60))
    windows = {o.setting["sliding_window"] for o in store.outcomes()} | {512}
    assert summary.gate["scored"] == len(windows)
    assert len(store.measurements("gate", "proof")) == 1


def test_a_known_setting_is_reused_and_said_to_be(edit_study, options):
    folder = edit_study("centroid_top_k: {low: 1, high: 128, log: true}", "centroid_top_k: {low: 32, high: 33}")
    spec = read_study(folder)
    summary = search(spec, options(60, sampler="random"), Silent())
    outcomes = stored(options(60)).outcomes()
    reused = [o for o in outcomes if o.reused_from is not None]
    assert summary.reused == len(reused) > 0
    for o in reused:
        source = outcomes[o.reused_from]
        assert (o.tps, o.ppl, o.state, o.setting) == (source.tps, source.ppl, source.state, source.setting)
        assert source.reused_from is None


def test_an_interrupted_search_goes_on_to_exactly_its_total(study_folder, options):
    spec = read_study(study_folder)
    for trial_to_stop, stage_to_stop in ((3, "gate"), (7, "speed"), (9, "apply")):
        observer = Silent()

        def stop(trial, stage, done, at=(trial_to_stop, stage_to_stop)):
            if trial >= at[0] and stage == at[1]:
                raise KeyboardInterrupt

        observer.on_stage = stop
        with pytest.raises(KeyboardInterrupt):
            search(spec, options(20), observer)
        assert not [t for t in optuna_trials(options(20)) if t.state == TrialState.RUNNING]
    summary = search(spec, options(20), Silent())
    assert summary.counts["complete"] + summary.counts["pruned"] == 20
    finished = [t for t in optuna_trials(options(20)) if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert len(finished) == 20
    assert all("ppl" in t.constraints for t in finished)
    # What was asked when the search stopped was asked again, and prompts timed before the stop are kept.
    failed = [t for t in optuna_trials(options(20)) if t.state == TrialState.FAIL]
    assert len(failed) == 3
    again = [t.user_attrs["asked_before_as"] for t in optuna_trials(options(20)) if "asked_before_as" in t.user_attrs]
    assert sorted(again) == sorted(t.number for t in failed)


def test_a_resumed_search_does_not_draw_the_same_settings_again(study_folder, options):
    spec = read_study(study_folder)
    search(spec, options(6, sampler="random"), Silent())
    search(spec, options(12, sampler="random"), Silent())
    settings = [tuple(o.setting.values()) for o in stored(options(12)).outcomes()]
    assert len(set(settings[1:6]) & set(settings[6:])) == 0


def test_two_searchers_on_one_study_finish_exactly_its_total(study_folder, options, python):
    command = [python, "-m", "search.run", "--study", str(study_folder), "--engine", "simulated", "--json"]
    command += ["--trials", "30", "--storage", options(30).storage]
    running = [
        subprocess.Popen(command, cwd=study_folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    outcomes = [o for o in stored(options(30)).outcomes() if o.state != "FAIL"]
    assert len(outcomes) == 30
    states = [t.state.name for t in optuna_trials(options(30))]
    assert states.count("COMPLETE") + states.count("PRUNED") == 30  # what both asked for was given up by one
    assert "RUNNING" not in states


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True)
    return [int(child) for child in found.stdout.split()]


def test_after_sigkill_the_same_command_finishes_the_study(study_folder, options, python):
    command = [python, "-m", "search.run", "--study", str(study_folder), "--engine", "simulated", "--json"]
    command += ["--trials", "400", "--storage", options(400).storage]
    process = subprocess.Popen(command, cwd=study_folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    database = Path(options(400).storage.removeprefix("sqlite:///"))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (database.exists() and stored(options(400)).finished() >= 5):
        time.sleep(0.1)
    (leash,) = children(process.pid)
    workers = children(leash)
    assert workers
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.5)
    assert not any(map(runs, [leash, *workers]))  # they die with their parent
    before = stored(options(400)).finished()
    summary = search(read_study(study_folder), options(before + 5), Silent())
    assert summary.counts["complete"] + summary.counts["pruned"] == before + 5
    assert not [t for t in optuna_trials(options(400)) if t.state == TrialState.RUNNING]


def test_an_unreachable_ceiling_is_said_before_any_trial(study_folder, options):
    with pytest.raises(SearchError, match="reference setting itself has perplexity 2.39"):
        search(read_study(study_folder).with_ceiling(1.5), options(5), Silent())
    assert optuna_trials(options(5)) == []


def test_no_feasible_trial_is_no_error(edit_study, options):
    folder = edit_study("low: 32, high: 512, step: 32", "low: 1, high: 64")
    summary = search(read_study(folder), options(5), Silent())
    assert summary.best is None and summary.front == [] and summary.counts["pruned"] == 5


def test_a_changed_study_is_refused_by_the_key_that_changed(study_folder, options):
    search(read_study(study_folder), options(2), Silent())
    file = study_folder / "study.yaml"
    file.write_text(file.read_text().replace("output_tokens: 64", "output_tokens: 32"))
    with pytest.raises(UsageError, match="started with workload.output_tokens = 64, now it is 32"):
        search(read_study(study_folder), options(4), Silent())


def test_an_engine_that_does_not_answer_stops_the_search_with_one_sentence(study_folder, options):
    spec = read_study(study_folder)
    hurried = replace(spec, limits=replace(spec.limits, apply_s=0.0))
    with pytest.raises(SearchError, match="reference setting could not be measured: The worker did not answer"):
        search(hurried, options(5), Silent())


def run(python, folder, *arguments):
    command = [python, "-m", "search.run", "--storage", "sqlite:///s.db", "--engine", "simulated", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_json_is_one_object_on_the_last_line_of_stdout(study_folder, python):
    done = run(python, study_folder, "--study", ".", "--trials", "5", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert set(document) >= {"study", "trials", "reference", "ceiling", "front", "best", "confirmed", "wall_s"}
    assert "SIMULATED" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--study", "nowhere"], 2, "There is no study 'nowhere'"),
        (["--study", ".", "--ppl-ceiling", "0.9"], 2, "--ppl-ceiling must be over 1"),
        (["--study", ".", "--trials", "0"], 2, "--trials must be at least 1"),
        (["--study", ".", "--storage", "study.db"], 2, "not a database URL"),
        (["--study", ".", "--storage", "sqlite:////proc/none/s.db"], 1, "cannot be written"),
        (["--study", ".", "--trials", "2", "--ppl-ceiling", "1.5"], 1, "over the ceiling"),
    ],
)
def test_a_mistake_is_one_sentence_and_an_exit_code(study_folder, python, arguments, code, says):
    done = run(python, study_folder, *arguments)
    assert done.returncode == code
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and says in errors[0]
    assert "Traceback" not in done.stderr


def test_help_comes_at_once(python):
    started = time.perf_counter()
    done = subprocess.run([python, "-m", "search.run", "--help"], capture_output=True, text=True, check=True)
    assert time.perf_counter() - started < 0.5
    assert "--trials" in done.stdout


ODD = "tests.odd_engines:"


def test_ten_failures_of_one_cause_in_a_row_end_the_search_with_one_sentence(study_folder, options):
    with pytest.raises(
        SearchError, match="10 trials in a row failed, the last one thus: out-of-memory in speed: .*drafter"
    ):
        search(read_study(study_folder), options(100, engine=ODD + "NoMemoryForDrafts", sampler="random"), Silent())
    failed = [o for o in stored(options(100)).outcomes() if o.state == "FAIL"]
    assert {(o.failure, o.failed_stage) for o in failed} == {("out-of-memory", "speed")}
    assert all(Path(o.log).is_file() for o in failed)


def test_a_setting_that_failed_twice_for_one_cause_is_not_tried_again(edit_study, options):
    edit_study("low: 32, high: 512, step: 32", "low: 512, high: 512")
    edit_study("low: 1, high: 128, log: true", "low: 32, high: 32")
    folder = edit_study("low: 0, high: 10, default: 4", "low: 4, high: 4")
    with pytest.raises(SearchError, match=r"10 trials .* not tried: it failed twice before \(out-of-memory\)"):
        search(read_study(folder), options(20, engine=ODD + "NoMemoryForDrafts"), Silent())
    tried = [o.failed_stage for o in stored(options(20)).outcomes()]
    assert tried == ["speed", "speed", *[None] * 8]


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("UselessDrafter", "0.0% of the first drafts are accepted: the drafter does not fit the model"),
        ("LoopsWithDrafts", "its outputs loop: 10% of their 4-grams are distinct"),
    ],
)
def test_a_broken_model_is_said_to_be_in_the_trial_and_in_the_summary(study_folder, options, engine, says):
    summary = search(read_study(study_folder), options(6, engine=ODD + engine), Silent())
    drafting = [
        o for o in stored(options(6)).outcomes() if o.state == "COMPLETE" and o.setting["num_speculative_tokens"]
    ]
    assert drafting and all(says in o.warning for o in drafting)
    assert says in summary.as_json()["warnings"][0]["warning"]
    assert any(f"WARNING, trial 0: {says}" in line for line in found(summary))


def test_a_model_that_is_worse_than_guessing_ends_the_search(study_folder, options):
    with pytest.raises(
        SearchError, match=r"The model is broken at its reference setting: a perplexity of 1,202,604 is worse"
    ):
        search(read_study(study_folder), options(5, engine=ODD + "KnowsNothing"), Silent())


def test_a_speed_that_no_memory_can_deliver_is_no_measurement(study_folder, options):
    with pytest.raises(
        SearchError, match=r"could not be measured: prompt p0: \d+ steps a second over 8.00 GB of weights"
    ):
        search(read_study(study_folder), options(5, engine=ODD + "TooFast"), Silent())


def test_a_study_is_not_gone_on_with_under_another_patch_of_vllm(study_folder, options, monkeypatch):
    search(read_study(study_folder), options(3), Silent())
    monkeypatch.setenv("FA_SLIDING", "1")
    with pytest.raises(UsageError, match="environment.FA_SLIDING = not set, now it is"):
        search(read_study(study_folder), options(5), Silent())
    monkeypatch.setenv("FA_SLIDING", "yes")
    with pytest.raises(UsageError, match="FA_SLIDING is 'yes': it must be 1"):
        search(read_study(study_folder), options(5), Silent())


def test_a_setting_that_another_searcher_is_at_is_not_asked_again(edit_study, options):
    edit_study("low: 32, high: 512, step: 32", "low: 480, high: 512, step: 32")
    edit_study("low: 1, high: 128, log: true", "low: 32, high: 32")
    folder = edit_study("low: 0, high: 10, default: 4", "low: 3, high: 4, default: 4")
    elsewhere = {"sliding_window": 512, "centroid_top_k": 32, "num_speculative_tokens": 3}
    store = stored(options(4))
    assert store.take_slot(4, NEIGHBOUR) == 0
    assert store.claim(0, NEIGHBOUR, 1000, setting_key(elsewhere)) is None
    store.searcher_started(NEIGHBOUR, "neighbour")
    search(read_study(folder), options(4, sampler="random", timeout_s=4.0), Silent())
    outcomes = store.outcomes()
    assert len(outcomes) == 3 and elsewhere not in [o.setting for o in outcomes]
    given_up = [t for t in optuna_trials(options(4)) if t.state == TrialState.FAIL]
    assert all(t.params == elsewhere for t in given_up)


def test_a_searcher_elsewhere_that_is_not_heard_of_gives_its_trial_back(study_folder, options):
    spec = read_study(study_folder)
    search(spec, options(3), Silent())
    store = stored(options(6))
    study = optuna.load_study(study_name="synthetic-simulated", storage=options(6).storage)
    left = study.ask({"sliding_window": optuna.distributions.IntDistribution(32, 512, step=32)})
    slot = store.take_slot(6, NEIGHBOUR)
    store.claim(slot, NEIGHBOUR, left.number, "its setting")  # it has no lease: its host is gone
    search(spec, options(6), Silent())
    assert store.finished() == 6 and len([o for o in store.outcomes() if o.state != "FAIL"]) == 6
    assert [
        t.user_attrs["asked_before_as"] for t in optuna_trials(options(6)) if "asked_before_as" in t.user_attrs
    ] == [left.number]


def put_right(url):
    database = open_engine(url)
    store = Store(database, "synthetic-simulated")
    return recover(open_study(url, store.study, database, DEFAULT), store)


def test_several_that_put_things_right_at_once_ask_for_a_lost_trial_once(study_folder, options):
    search(read_study(study_folder), options(3), Silent())
    store = stored(options(6))
    study = optuna.load_study(study_name=store.study, storage=options(6).storage)
    left = study.ask({"sliding_window": optuna.distributions.IntDistribution(32, 512, step=32)})
    store.claim(store.take_slot(6, NEIGHBOUR), NEIGHBOUR, left.number, "its setting")
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("fork")) as pool:
        assert sum(pool.map(put_right, [options(6).storage] * 4)) == 1
    waiting = [t for t in optuna_trials(options(6)) if t.state == TrialState.WAITING]
    assert [t.user_attrs["asked_before_as"] for t in waiting] == [left.number]
