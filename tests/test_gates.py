"""Several gates at once: whole searches on the simulated engine, whose agreement and tasks are made up."""

import hashlib
import json
import re
import sqlite3
from functools import partial
from pathlib import Path

import optuna
import pytest
from conftest import write_lines
from test_study import Silent, stored

from search import gates
from search.answers import Answer, judge, marked
from search.data import content_hash, read_tasks
from search.engine.protocol import Load, Solve
from search.engine.simulated import SimulatedEngine
from search.errors import SearchError, UsageError
from search.knobs import DRAFTS
from search.review import ReviewStorage, study_note, trial_note
from search.spec import read_study
from search.store import REFERENCE
from search.store.frames import frames
from search.study import search

ALL = (
    "gate:\n  records: records.jsonl\n  ceiling: {ratio: 1.05}\n  agreement: {top1: 0.96, kl: 0.04}\n"
    "  tasks: {file: tasks.jsonl, max_tokens: 8, drop: 0.25}\n"
)
PPL_ALONE = "gate: {records: records.jsonl, ceiling: {ratio: 1.05}}\n"


def write_tasks(folder, count=16):
    """Tasks that the simulated engine answers at its own window: the last word, or the last token."""
    rows = [{"id": f"t{i}", "prompt": f"repeat {i}", "expected": f"{i}\n"} for i in range(count - 4)]
    rows += [{"id": f"i{i}", "prompt_token_ids": [1, 2, i], "expected": f"{i}"} for i in range(4)]
    write_lines(folder / "tasks.jsonl", rows)


@pytest.fixture
def gated(edit_study):
    """The study with every gate, or with those that `gate` says."""

    def make(gate=ALL):
        folder = edit_study(PPL_ALONE, gate)
        write_tasks(folder)
        return read_study(folder)

    return make


@pytest.fixture
def options(options):
    """Drawn at random, unless a test asks for another sampler."""
    return partial(options, sampler="random")


def tasks_alone(**keys):
    words = ", ".join(f"{k}: {v}" for k, v in {"file": "tasks.jsonl", "max_tokens": 8, **keys}.items())
    return PPL_ALONE.replace("}}\n", f"}}, tasks: {{{words}}}}}\n")


# The study file -------------------------------------------------------------------------------------------


def test_the_gates_of_a_study_file_are_read_and_are_part_of_what_it_is(gated, study_folder):
    before = read_study(study_folder).definition()
    spec = gated()
    assert spec.gate.names == gates.GATES == ("ppl", "top1", "kl", "exact")
    assert (spec.gate.agreement.top1, spec.gate.agreement.kl, spec.gate.tasks.drop) == (0.96, 0.04, 0.25)
    assert len(spec.tasks()) == 16
    after = spec.definition()
    assert set(after) - set(before) == {"gate.agreement", "gate.tasks", "gate.tasks.file"}
    assert {key: after[key] for key in before} == before  # a study of before these gates is what it was
    write_tasks(study_folder, 12)
    assert spec.definition()["gate.tasks.file"] != after["gate.tasks.file"]
    assert spec.with_ceiling(3.0).gate.tasks == spec.gate.tasks


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        (ALL.replace("top1: 0.96", "top1: 1.01"), "line 18: gate.agreement.top1 is a share: it must be at most 1"),
        (ALL.replace("{top1: 0.96, kl: 0.04}", "{}"), "gate.agreement takes top1, kl, or both"),
        (ALL.replace("kl: 0.04", "kl: -1"), "gate.agreement.kl must be at least 0"),
        (ALL.replace("kl: 0.04", "top5: 1"), "gate.agreement.top5 is not a key of a study file"),
        (ALL.replace("drop: 0.25", "drop: 0.25, exact: 0.5"), "gate.tasks takes exactly one of exact and drop"),
        (ALL.replace(", drop: 0.25", ""), "gate.tasks takes exactly one of exact and drop"),
        (ALL.replace("max_tokens: 8", "max_tokens: 0"), "line 19: gate.tasks.max_tokens must be at least 1"),
        (ALL.replace("drop: 0.25", "drop: 0.25, stop: end"), "gate.tasks.stop must be a list"),
        (ALL.replace("drop: 0.25", "drop: 0.25, stop: ['']"), "gate.tasks.stop must be a list of texts"),
        (ALL.replace("drop: 0.25", r'drop: 0.25, stop: ["\ud800"]'), "gate.tasks.stop must be a list of texts"),
        (ALL.replace("agreement:", "agrement:"), "did you mean agreement"),
    ],
)
def test_a_mistake_in_a_gate_is_named_with_its_key(gated, gate, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        gated(gate)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id": 1, "expected": "a"}', "exactly one of prompt and prompt_token_ids is needed"),
        ('{"id": 1, "prompt": "a", "prompt_token_ids": [1], "expected": "a"}', "exactly one of prompt"),
        ('{"id": 1, "prompt": "a"}', "'expected' is missing"),
        ('{"id": 1, "prompt": "a", "expected": " \\n"}', "expected must be a text that is not blank"),
        ('{"id": 1, "prompt": 7, "expected": "a"}', "prompt must be a text"),
        ('{"id": 1, "prompt": "\\ud800", "expected": "a"}', "prompt is no text that UTF-8 can hold"),
    ],
)
def test_a_bad_task_is_named_with_its_line(tmp_path, line, says):
    (tmp_path / "tasks.jsonl").write_text(f'{{"id": 0, "prompt": "a", "expected": "b"}}\n{line}\n')
    with pytest.raises(UsageError, match=f"line 2: {re.escape(says)}"):
        read_tasks(tmp_path / "tasks.jsonl")


# Answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        (" 42\n", "42", True),
        ("a\u00a0 b\t\r\nc", "a b c", True),
        ("ab c", "a bc", False),
        ("Paris", "paris", False),
        ("Paris.", "Paris", False),
        ("", "x", False),
    ],
)
def test_white_space_alone_does_not_make_an_answer_wrong(answer, expected, same):
    assert marked(answer, expected).matched is same


def test_tasks_refuse_a_setting_when_the_rest_cannot_bring_it_back():
    order = [f"t{i}" for i in range(10)]

    def after(*matched):
        return judge({t: Answer("", m) for t, m in zip(order, matched, strict=False)}, order, 0.6)

    assert after(*[False] * 4).outcome == "undecided"  # six more may be right
    assert after(*[False] * 5).outcome == "over"
    assert after(*[True] * 9).outcome == "undecided"  # acceptance has all of them asked
    assert after(*[True] * 6, *[False] * 4).outcome == "under"  # 0.6 of ten is six, whatever 0.6 is in binary
    assert after(*[True] * 5, *[False] * 5).excess == pytest.approx(0.1)


# Searches -------------------------------------------------------------------------------------------------


def test_a_collapse_that_perplexity_misses_is_pruned_by_the_tasks(gated, options):
    spec = gated(tasks_alone(drop=0.25))
    search(spec, options(40), Silent())
    outcomes = stored(options(40)).outcomes()
    missed = [o for o in outcomes if o.state == "PRUNED" and o.excess < 0]
    assert missed  # under the ceiling, and yet refused
    for o in missed:
        assert o.gates["exact"]["excess"] > 0 and o.gates["ppl"]["excess"] == o.excess < 0
        assert re.match(r"gate exact: 0\.\d+ of the tasks answered as expected", o.reason)
        assert o.tps is None and not stored(options(40)).measurements("speed", "done", o.trial)
    passed = [o for o in outcomes if o.state == "COMPLETE"]
    assert passed and all(o.gates["exact"]["figure"] >= 0.75 for o in passed)
    assert max(o.setting["sliding_window"] for o in missed) < min(o.setting["sliding_window"] for o in passed)


@pytest.mark.parametrize(
    ("agreement", "refusing"),
    [("top1: 0.95, kl: 9", "top1"), ("top1: 0.1, kl: 0.04", "kl"), ("top1: 0.9, kl: 9", "ppl")],
)
def test_a_setting_that_one_gate_refused_is_not_asked_the_others_and_optuna_is_told_zero_of_them(
    gated,
    options,
    agreement,
    refusing,
):
    search(gated(ALL.replace("top1: 0.96, kl: 0.04", agreement)), options(40), Silent())
    store = stored(options(40))
    study = optuna.load_study(study_name=store.study, storage=options(40).storage)
    told = {trial.number: trial for trial in study.get_trials()}
    seen = set()
    for o in store.outcomes():
        assert list(o.gates) == list(gates.GATES)
        constraints = told[o.trial].constraints
        assert set(constraints) == set(gates.GATES)
        for name, found in o.gates.items():
            assert constraints[name] == (found["excess"] if found else 0.0)
        refused = gates.refusers(o.gates)
        seen.update(refused)
        assert (o.state == "PRUNED") == bool(refused) == any(v > 0 for v in constraints.values())
        if o.gates["exact"] is None:
            assert {"ppl", "top1", "kl"} & set(refused)
            assert not store.measurements("tasks", "done", o.trial)
        assert all(f"gate {name}" in o.reason for name in refused if name != "ppl")
    assert seen == {refusing, "exact"}
    front = {point.trial for point in store.front()}
    assert front and all(told[trial].state.name == "COMPLETE" for trial in front)


def test_the_reference_agrees_with_itself_in_full_and_small_windows_agree_less(gated, options):
    loose = ALL.replace("top1: 0.96, kl: 0.04", "top1: 0.0, kl: 9.0").replace("drop: 0.25", "drop: 1.0")
    search(gated(loose.replace("1.05", "9.0")), options(30), Silent())
    store = stored(options(30))
    reference = store.outcome(REFERENCE).gates
    assert (reference["top1"]["figure"], reference["kl"]["figure"], reference["exact"]["figure"]) == (1.0, 0.0, 1.0)
    by_window = {o.setting["sliding_window"]: o.gates for o in store.outcomes() if o.state == "COMPLETE"}
    if 512 in by_window:
        assert (by_window[512]["top1"]["figure"], by_window[512]["kl"]["figure"]) == (1.0, 0.0)
    kls = [by_window[w]["kl"]["figure"] for w in sorted(by_window)]
    assert kls == sorted(kls, reverse=True) and kls[0] > 0.1
    small = min(by_window)
    assert by_window[small]["top1"]["figure"] < 0.9 and by_window[small]["exact"]["figure"] < 0.5


def test_what_the_gates_found_is_remembered_by_the_quality_knobs(gated, options):
    search(gated(), options(40), Silent())
    store = stored(options(40))
    done = [m.setting["sliding_window"] for m in store.measurements("tasks", "done") if m.trial != REFERENCE]
    remembered = store.measurements("tasks", "remembered")
    assert len(set(done)) == len(done) and remembered
    first = {m.setting["sliding_window"]: m.figures["exact"] for m in store.measurements("tasks", "done")}
    assert all(m.figures["exact"] == first[m.setting["sliding_window"]] for m in remembered)


def test_tasks_are_answered_without_drafts_and_prompts_are_timed_with_them(gated, options):
    search(gated(), options(30), Silent())
    store = stored(options(30))
    answered = {m.trial for m in store.measurements("tasks", "done")}
    drafting = [m for m in store.measurements("speed", "done") if m.trial in answered and m.setting[DRAFTS] > 0]
    assert drafting  # the engine was put to K = 0 for the tasks, and back
    for row in drafting:
        assert all(t.drafts > 0 and t.draft_tokens == t.drafts * row.setting[DRAFTS] for t in row.timings)


def test_tasks_that_were_answered_before_an_interrupt_are_not_asked_again(gated, options):
    spec, observer, asked = gated(tasks_alone(drop=0.25)), Silent(), []

    def interrupt(trial, stage, done):
        if stage == "tasks" and trial == REFERENCE and done == 7:
            raise KeyboardInterrupt

    observer.on_stage = interrupt
    with pytest.raises(KeyboardInterrupt):
        search(spec, options(1), observer)
    observer.on_stage = lambda trial, stage, done: asked.append((trial, done)) if stage == "tasks" else None
    search(spec, options(1), observer)
    assert [done for trial, done in asked if trial == REFERENCE] == list(range(7, 16))


def test_a_study_with_gates_goes_on_where_it_stopped_and_refuses_changed_ones(gated, options, study_folder):
    spec = gated()
    search(spec, options(8), Silent())
    again = search(spec, options(16), Silent())
    assert again.counts["complete"] + again.counts["pruned"] == 16
    with sqlite3.connect(options(16).storage.removeprefix("sqlite:///")) as database:
        kept = "SELECT count(*), count(distributions) FROM pareto_record_score WHERE top1 IS NOT NULL"
        scores, distributions = database.execute(kept).fetchone()
    assert distributions == 16 < scores  # those of the reference, once
    file = study_folder / "study.yaml"
    file.write_text(file.read_text().replace("top1: 0.96", "top1: 0.9"))
    with pytest.raises(UsageError, match="started with gate.agreement"):
        search(read_study(study_folder), options(20), Silent())


def test_the_reference_must_answer_what_it_asks_of_others(gated, options, study_folder):
    spec = gated(tasks_alone(exact=0.9))
    write_lines(
        study_folder / "tasks.jsonl",
        [{"id": i, "prompt": f"say {i}", "expected": str(i % 4)} for i in range(8)],  # half of them wrongly
    )
    with pytest.raises(SearchError, match=r"itself answers 0\.5000 of the tasks .* 0\.9000 are asked for"):
        search(spec, options(3), Silent())


def test_the_default_sampler_keeps_away_from_what_another_gate_refused(gated, options):
    pytest.importorskip("botorch")
    spec = gated(tasks_alone(drop=0.25))
    search(spec, options(30, sampler="gated"), Silent())
    outcomes = stored(options(30)).outcomes()
    passed = [o.setting["sliding_window"] for o in outcomes if o.state == "COMPLETE"]
    late = [o for o in outcomes[15:] if o.state == "PRUNED"]
    assert len(late) <= 3, [(o.setting, o.reason) for o in late]
    # The ceiling alone would let windows of 96 pass; the smallest whose tasks hold is found all the same.
    allowed = smallest_that_answers(spec, 0.75)
    assert allowed > 96 and min(passed) <= allowed + 32


def smallest_that_answers(spec, share):
    """The smallest window of the range at which the simulated engine answers so many of the tasks."""
    engine = SimulatedEngine()
    engine.load(Load(model="m", drafter="d", args={}, limits={}))
    (knob,) = (k for k in spec.knobs if k.name == "sliding_window")
    for window in range(knob.low, knob.largest + 1, knob.step):
        engine._setting["sliding_window"] = window
        given = [(t, list(t.prompt) if isinstance(t.prompt, tuple) else t.prompt) for t in spec.tasks()]
        texts = [(t, engine.solve(Solve(task=t.id, prompt=p, max_tokens=8)).text) for t, p in given]
        if sum(marked(text, t.expected).matched for t, text in texts) >= share * len(texts):
            return window
    raise AssertionError("no window answers")


@pytest.mark.parametrize("sampler", ["gp", "nsga2"])
def test_optunas_own_samplers_learn_from_all_gates(gated, options, sampler):
    pytest.importorskip("torch")
    search(gated(), options(12, sampler=sampler), Silent())
    assert stored(options(12)).finished() == 12


def test_the_dashboard_is_shown_the_constraints_in_the_gates_order(gated, options):
    search(gated(), options(12), Silent())
    store = stored(options(12))
    storage = ReviewStorage(options(12).storage)
    shown = storage.get_all_trials(storage.get_study_id_from_name(store.study))
    for o, trial in zip(store.outcomes(), shown, strict=True):
        expected = [found["excess"] if found else 0.0 for found in (o.gates[name] for name in gates.GATES)]
        assert trial.system_attrs["constraints"] == expected


def test_the_summary_the_frames_and_the_notes_say_what_each_gate_did(gated, options):
    from search.closing import found

    summary = search(gated(), options(40), Silent())
    document = json.loads(json.dumps(summary.as_json()))
    store = stored(options(40))
    by_gate = [gates.refusers(o.gates) for o in store.outcomes()]
    for name in gates.GATES:
        assert document["gates"][name]["refused"] == sum(name in names for names in by_gate)
    assert document["gates"]["exact"] == {**document["gates"]["exact"], "limit": 0.75, "reference": 1.0}
    assert all(set(point["gates"]) == {"top1", "kl", "exact"} for point in document["front"])
    assert f"or by another gate (top1 {document['gates']['top1']['refused']}, kl" in found(summary)[0]
    table = frames(store)
    pruned = table.trials[table.trials.state == "PRUNED"]
    assert pruned.refused_by.notna().all() and {"top1", "kl", "exact"} <= set(table.trials.columns)
    (row,) = table.trials[table.trials.trial == document["best"]["trial"]].itertuples()
    top1, kl, exact = (document["best"]["gates"][name] for name in ("top1", "kl", "exact"))
    assert f"looked at: top1 {top1:.4f}, kl {kl:.4f}, exact {exact:.4f}." in trial_note(row, table)
    note = study_note(table)
    assert "Other gates: top1 at least 0.9600 (the reference 1.0000), kl at most 0.0400" in note


def test_a_study_without_other_gates_says_nothing_of_them(searched):
    from search.closing import found
    from search.store import Store, open_engine
    from search.summary import summarize

    store = Store(open_engine(searched), "synthetic-simulated")
    assert "another gate" not in found(summarize(store, 1, 1.0))[0]
    assert "Other gates" not in study_note(frames(store))
    assert {o.gates and tuple(o.gates) for o in store.outcomes()} == {("ppl",)}
    folder = Path(searched.removeprefix("sqlite:///")).parent
    with sqlite3.connect(folder / "study.db") as database:
        assert database.execute("SELECT count(*) FROM pareto_record_score WHERE top1 IS NOT NULL").fetchone() == (0,)
    # And finds what was scored before there were other gates.
    (started,), records = store.environments(), content_hash(folder / "records.jsonl")
    key = repr((started.model_hash, started.build_hash, records, [("sliding_window", 512)]))
    assert len(store.remembered_scores(hashlib.sha256(key.encode()).hexdigest()[:16])) == 16
