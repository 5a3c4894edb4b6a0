"""Fronts of other figures than TPS and perplexity."""

import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import optuna
import pytest
from optuna.study import StudyDirection
from test_study import Silent, optuna_trials, stored

from search import run
from search.closing import found, verdict
from search.confirm import finalists
from search.errors import SearchError, UsageError
from search.objectives import OBJECTIVES, losses, value
from search.report.figures import all_figures
from search.report.page import render
from search.review import study_note, trial_note
from search.spec import read_study
from search.store import REFERENCE, Outcome, load, pareto_front
from search.study import definition, search

ASKED = [*itertools.combinations(OBJECTIVES, 2), *itertools.combinations(OBJECTIVES, 3)]


@pytest.fixture
def study_of(study_folder):
    """The synthetic study with these objectives."""

    def make(*names):
        file = study_folder / "study.yaml"
        text = "".join(line for line in file.read_text().splitlines(True) if not line.startswith("objectives"))
        file.write_text(f"{text}objectives: [{', '.join(names)}]\n")
        return read_study(study_folder)

    return make


@dataclass(frozen=True)
class Point:
    tps: float | None
    ppl: float | None
    figures: dict = field(default_factory=dict)


@pytest.mark.parametrize("objectives", ASKED)
def test_a_front_of_any_objectives_is_exactly_the_unbeaten_points(objectives):
    draw = random.Random(0)
    for _ in range(20):
        points = [
            Point(draw.randrange(9), draw.randrange(9), {name: draw.randrange(9) for name in list(OBJECTIVES)[2:]})
            for _ in range(40)
        ]
        lost = [losses(p, objectives) for p in points]
        unbeaten = {a for a in lost if not any(b != a and all(x <= y for x, y in zip(b, a, strict=True)) for b in lost)}
        front = [losses(p, objectives) for p in pareto_front(points, objectives)]
        assert set(front) == unbeaten and len(front) == len(unbeaten)


def test_more_tokens_are_better_and_less_of_all_else():
    one = Point(9.0, 2.0, {"ttft_s": 0.5})
    assert losses(one, ("tps", "ppl", "ttft_s")) == (-9.0, 2.0, 0.5)
    assert losses(one, ("tps", "energy_j")) is None and pareto_front([one], ("tps", "energy_j")) == []


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("[tps, latency]", "line 16: objectives: 'latency' is not one of tps, ppl, ttft_s"),
        ("[tps]", "line 16: objectives must name two or three different ones"),
        ("[tps, tps]", "two or three different ones"),
        ("[tps, ppl, ttft_s, energy_j]", "two or three different ones"),
        ("[tps, [ppl]]", r"\['ppl'\] is not one of"),
        ("tps", "objectives must be a list"),
    ],
)
def test_objectives_that_cannot_be_are_refused_with_their_line(study_folder, named, says):
    file = study_folder / "study.yaml"
    file.write_text(f"{file.read_text()}objectives: {named}\n")
    with pytest.raises(UsageError, match=says):
        read_study(study_folder)


def test_tps_and_perplexity_are_what_a_study_is_about_that_names_none(study_of, study_folder):
    usual = read_study(study_folder)
    assert study_of("ppl", "tps").objectives == usual.objectives == ("tps", "ppl")
    assert definition(study_of("tps", "ppl")) == definition(usual)
    assert definition(study_of("ttft_s", "tps")) == {**definition(usual), "objectives": ["tps", "ttft_s"]}


@pytest.mark.parametrize("objectives", [("tps", "ttft_s"), ("tps", "ppl", "itl_p95_s"), ("ppl", "itl_p95_s")])
def test_a_search_finds_the_front_of_its_objectives(study_of, options, objectives):
    spec, observer = study_of(*objectives), Silent()
    search(spec, options(15), observer)
    summary = search(spec, options(40), observer)  # goes on with them
    store = stored(options(40))
    passed = [o for o in store.outcomes() if o.state == "COMPLETE"]
    assert summary.counts["pruned"] > 0 and all(o.ppl <= summary.ceiling for o in passed)
    unbeaten = {losses(p, objectives) for p in pareto_front(passed, objectives)}
    assert {losses(p, objectives) for p in store.front()} == unbeaten
    assert {o.prompts for o in passed} == {24}  # the same of each: medians and tails of others say something else
    trials = optuna_trials(options(40))
    study = optuna.load_study(study_name="synthetic-simulated", storage=options(40).storage)
    assert study.metric_names == list(objectives)
    assert [d == StudyDirection.MAXIMIZE for d in study.directions] == [n == "tps" for n in objectives]
    assert all(trials[o.trial].values == [value(o, n) for n in objectives] for o in passed)
    said = "\n".join(found(summary))
    assert "Fastest of a front of" in said and f"Least {OBJECTIVES[objectives[-1]].words}: trial" in said
    assert f"(reference: {OBJECTIVES[objectives[-1]].shown(value(store.outcome(REFERENCE), objectives[-1]))})" in said
    point = min(summary.as_json()["front"], key=lambda p: p[objectives[-1]])
    assert point[objectives[-1]] == min(value(o, objectives[-1]) for o in passed)


def test_what_is_shown_of_a_study_names_its_objectives(study_of, options):
    search(study_of("tps", "ppl", "ttft_s"), options(30), Silent())
    frames = load(options(30).storage)
    assert frames.objectives == ("tps", "ppl", "ttft_s")
    page = render(frames, [])
    assert "<th>ms to the first token</th>" in page and "Front of tokens a second, perplexity, time to" in page
    drawn = {figure.name: figure for figure in all_figures(frames)}
    assert len(drawn["front"].plot.data[1].x) == frames.trials.on_front.sum()
    assert drawn["front"].plot.data[1].marker.showscale and "yaxis3" not in drawn["progress"].plot.layout
    assert "made of tokens a second, perplexity, time to the first token" in study_note(frames)
    best = next(frames.trials[frames.trials.on_front].itertuples())
    assert f"first token after {best.ttft_s * 1e3:.1f} ms" in trial_note(best, frames)


def test_a_figure_names_knobs_that_are_no_python_names(study_of, study_folder, options):
    file = study_folder / "study.yaml"
    file.write_text(file.read_text().replace("knobs:\n", "knobs:\n  env.VLLM_X: {choices: [0, 1]}\n"))
    search(study_of("tps", "ttft_s"), options(12, sampler="random"), Silent())
    shown = next(f for f in all_figures(load(options(12).storage)) if f.name == "front").plot.data[1].text
    assert all("env.VLLM_X" in text and "first token after" in text for text in shown)


def test_the_fastest_and_the_best_in_each_objective_are_finalists(study_of, options):
    objectives = ("tps", "ppl", "ttft_s")
    search(study_of(*objectives), options(40), Silent())
    store = stored(options(40))
    front = store.front()
    assert len(front) > 3
    chosen = finalists(store, 3)
    assert chosen[0].tps == max(point.tps for point in front)
    for name in objectives:
        assert min(losses(o, [name]) for o in chosen) == min(losses(point, [name]) for point in front)


def test_a_sampler_that_does_not_know_the_objectives_is_refused_from_python_too(study_of, options):
    with pytest.raises(UsageError, match="perplexity alone, and this study.s objectives are .* time to the"):
        search(study_of("tps", "ttft_s"), options(3, sampler="gated"), Silent())
    with pytest.raises(UsageError, match="--stop auto needs --sampler gated"):
        search(study_of("tps", "ttft_s"), options(3, stop_early=True), Silent())


def test_a_trials_line_has_the_figures_of_its_objectives():
    found = Outcome(state="COMPLETE", setting={}, tps=10.0, ppl=2.0, figures={"ttft_s": 0.0123}, trial=1)
    assert verdict(found, ("tps", "ttft_s")).endswith("10.0 tok/s, perplexity 2.0000, first token after 12.3 ms")
    assert verdict(found).endswith("10.0 tok/s, perplexity 2.0000")


def test_objectives_are_part_of_what_a_study_is(study_of, options):
    search(study_of("tps", "ttft_s"), options(3), Silent())
    with pytest.raises(UsageError, match=r'started with objectives = \["tps", "ttft_s"\], now it is not set'):
        search(study_of("tps", "ppl"), options(4), Silent())


def test_an_objective_that_the_engine_does_not_tell_of_ends_the_search_at_the_reference(study_of, options):
    with pytest.raises(SearchError, match=r"name energy_j, which cannot be measured here: .* of tps, ppl, ttft_s, itl"):
        search(study_of("tps", "energy_j"), options(3), Silent())
    assert stored(options(3)).outcome(REFERENCE) is None


def test_energy_that_nothing_counts_is_said_before_an_engine_starts(study_of, options, monkeypatch):
    monkeypatch.setattr("search.study.check_inputs", lambda spec: None)
    monkeypatch.setattr("search.engine.gpu.energy_j", lambda: None)
    with pytest.raises(UsageError, match="name energy_j, and there is no GPU here that counts it"):
        search(study_of("tps", "energy_j"), options(3, engine="vllm"), Silent())
    assert not Path(options(3).storage.removeprefix("sqlite:///")).exists()


def test_a_trial_that_lacks_an_objective_fails_and_its_others_stand(study_of, options):
    asked = options(12, engine="tests.odd_engines:TellsNoLongWaits", sampler="random")
    summary = search(study_of("tps", "itl_p95_s"), asked, Silent())
    outcomes = stored(asked).outcomes()
    failed = [o for o in outcomes if o.state == "FAIL"]
    assert summary.counts["complete"] + summary.counts["pruned"] == 12 and failed
    assert all("there is no itl_p95_s of it" in o.reason and o.setting["num_speculative_tokens"] > 4 for o in failed)
    assert all(o.setting["num_speculative_tokens"] <= 4 for o in outcomes if o.state == "COMPLETE")


@pytest.mark.parametrize("sampler", ["gp", "nsga2"])
def test_samplers_that_learn_from_pruned_trials_learn_other_objectives(study_of, options, sampler):
    asked = options(12, sampler=sampler)
    summary = search(study_of("tps", "ppl", "peak_bytes"), asked, Silent())
    assert summary.counts["complete"] + summary.counts["pruned"] == 12 and summary.counts["failed"] == 0


def test_the_command_takes_a_sampler_that_knows_the_objectives(study_of, study_folder, tmp_path, capsys):
    study_of("tps", "ttft_s")
    where = ["--study", str(study_folder), "--storage", f"sqlite:///{tmp_path}/s.db", "--logs", str(tmp_path / "logs")]
    command = [*where, "--engine", "simulated", "--trials", "4", "--json"]
    assert run.main(command) == 0
    said = capsys.readouterr()
    assert "sampler tpe (default: gated knows no such objectives)" in said.err
    assert ", first token after " in said.err
    document = json.loads(said.out)
    assert document["objectives"] == ["tps", "ttft_s"] and document["front"][0]["ttft_s"] > 0
    for more in (["--sampler", "gated"], ["--stop", "auto"]):
        with pytest.raises(SystemExit) as ended:
            run.main([*command, *more])
        assert ended.value.code == 2 and "--sampler gated" in capsys.readouterr().err
