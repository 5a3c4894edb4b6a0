"""The samplers: what they propose, why, and what they leave alone."""

import dataclasses
import importlib.util
import math
import subprocess
import time

import numpy as np
import optuna
import pytest
from conftest import ROOT
from optuna.trial import TrialState

from search import run
from search.bench.replay import Bench, first_setting, optimum, replay
from search.bench.variants import BY_LABEL, PUBLIC_POINTS
from search.errors import UsageError
from search.knobs import DRAFTS, TOP_K, WINDOW
from search.landscapes import A10G, LANDSCAPES, MINIATURE
from search.recovery import tell
from search.samplers import SAMPLERS, Problem, edge, make_sampler, trial_seed
from search.samplers.gated import GAIN, asked_on_all, propose, worth_another
from search.samplers.history import History, history
from search.samplers.prior import WHY, proposals, read_prior, settled
from search.samplers.shadow import ShadowSampler

GATED = BY_LABEL["gated"].make


def problem_of(landscape, prior=()):
    return Problem(landscape.knobs, landscape.ceiling, Bench(landscape, 0).reference(), tuple(prior))


class Replayed:
    """A study that stands where a search of so many trials left it."""

    def __init__(self, landscape, sampler, trials):
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.bench, self.problem, self.sampler = Bench(landscape, 0), problem_of(landscape), sampler
        self.study = optuna.create_study(directions=["maximize", "minimize"])
        self.study.enqueue_trial(first_setting(landscape))
        for _ in range(trials):
            self.go_on()

    def ask(self, seed=0):
        ordinal = len(self.study.get_trials(deepcopy=False))
        self.study.sampler = make_sampler(self.sampler, self.problem, trial_seed(seed, ordinal, 0))
        return self.study.ask(self.problem.distributions)

    def go_on(self):
        trial = self.ask()
        on_all = asked_on_all(self.study, trial)
        tell(self.study, self.bench.measure(trial.number, trial.params, on_all=on_all))

    def history(self):
        return history(self.study, self.problem, -1)


@pytest.fixture(scope="module")
def gated():
    return Replayed(A10G, "gated", 24)


def test_search_run_names_the_samplers_there_are():
    assert set(run.SAMPLERS) == set(SAMPLERS) and run.DEFAULTS["sampler"] in SAMPLERS


def test_torch_is_imported_by_no_command_and_by_no_sampler_before_it_has_to_propose(python):
    code = "import search.study, search.samplers.gated, search.samplers.shadow, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([python, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_sampler_whose_package_is_missing_says_what_to_install(monkeypatch, study_folder, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "botorch" else there(name))
    with pytest.raises(UsageError, match="--sampler gated needs botorch: pip install botorch, or take --sampler tpe"):
        make_sampler("gated", problem_of(A10G), 0)
    arguments = ["--study", str(study_folder), "--engine", "simulated", "--trials", "2"]
    arguments += ["--storage", f"sqlite:///{study_folder}/s.db", "--logs", str(study_folder / "logs")]
    with pytest.raises(SystemExit):
        run.main([*arguments, "--stop", "auto"])
    assert "--stop auto needs botorch" in "".join(capsys.readouterr())
    assert run.main(arguments) == 0  # by default without it, and says so
    assert "sampler tpe (default: botorch is not installed)" in "".join(capsys.readouterr()).replace("\n", " ")


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_every_sampler_asks_within_the_ranges_and_never_twice_alike_after_a_resume(name):
    first = Replayed(MINIATURE, name, 13)  # Optuna's GP has its models from the eleventh trial on
    for trial in first.study.get_trials():
        assert all(k.low <= trial.params[k.name] <= k.high for k in MINIATURE.knobs)
        assert all((trial.params[k.name] - k.low) % k.step == 0 for k in MINIATURE.knobs)
    asked = [tuple(t.params.values()) for t in first.study.get_trials()]
    assert len(set(asked[1:])) > 9


def test_the_edge_of_the_ceiling_is_found_in_few_trials_of_which_few_are_over(gated):
    trials = gated.study.get_trials()
    over = [t for t in trials if t.state == TrialState.PRUNED]
    assert len(over) <= 2
    assert min(t.params[WINDOW] for t in trials[:6] if t.state == TrialState.COMPLETE) in (144, 148)


def test_a_bracket_closes_on_every_edge_whatever_the_law():
    for reach, rise in ((49.5, 0.768), (200.0, 0.2), (20.0, 5.0)):
        knob = A10G.knobs[0]
        reference = 2.3769 + rise * math.exp(-512 / reach)
        found, allowed, tried = edge.Bracket(512, 0.0, None, math.nan), math.log(2.42 / reference), 0
        while (value := edge.next_value(knob, found, allowed)) is not None:
            rises, tried = math.log((2.3769 + rise * math.exp(-value / reach)) / reference), tried + 1
            if rises <= allowed:
                found = dataclasses.replace(found, under=value, under_rise=rises)
            else:
                found = dataclasses.replace(found, over=value, over_rise=rises)
        edge_at = reach * math.log(rise / (2.42 - 2.3769))
        assert tried <= 7
        assert max(64, edge_at) <= found.under <= max(64, edge_at) * 1.05 + 4, (reach, found)


def refused_by_tasks(measured, excess=0.2):
    """A trial as it is when it was under the ceiling, and another gate refused it."""
    return dataclasses.replace(measured, tps=None, constraints={**measured.constraints, "exact": excess})


def test_a_value_that_another_gate_refused_is_over_and_no_secant_goes_through_it(gated):
    problem, past = gated.problem, gated.history()
    knob = edge.edge_knob(problem)
    passed = [m for m in past.measured if m.under(problem.ceiling)]
    smallest = min(m.setting[WINDOW] for m in passed)
    measured = tuple(refused_by_tasks(m) if m.setting[WINDOW] == smallest else m for m in past.measured)
    found = edge.bracket(knob, problem, History(measured, ()))
    assert found.over == smallest < found.under and math.isnan(found.over_rise)
    value = edge.next_value(knob, found, math.log(problem.ceiling / problem.reference.ppl))
    assert value is None or found.over < value < found.under
    harmless = tuple(refused_by_tasks(m, 0.0) if m.setting[WINDOW] == smallest else m for m in past.measured)
    assert edge.bracket(knob, problem, History(harmless, ())).under == smallest  # a gate that was not asked


def test_the_models_give_no_chance_to_what_another_gate_refused_and_little_to_smaller_windows(gated):
    from search.samplers.forecast import Forecast

    problem, past = gated.problem, gated.history()
    allowed = sorted({m.setting[WINDOW] for m in past.measured if m.under(problem.ceiling)})
    limit = allowed[len(allowed) // 2]
    measured = tuple(refused_by_tasks(m) if m.setting[WINDOW] <= limit else m for m in past.measured)
    there = [{WINDOW: w, TOP_K: 32, DRAFTS: 4} for w in (limit, limit - 4, allowed[-1])]
    before = Forecast(problem, past).judge(there)
    after = Forecast(problem, History(measured, ())).judge(there)
    assert before.passes[0] > 0.9 and before.passes[2] > 0.9
    assert after.passes[0] == 0 and after.passes[1] <= 0.02 and after.passes[2] > 0.9
    assert after.expected.log_ppl == pytest.approx(before.expected.log_ppl, abs=1e-3)  # of which it says nothing


def test_optunas_gp_is_shown_one_constraint_a_gate_in_one_order(gated):
    sampler = ShadowSampler(gated.problem, 0, lambda seed: optuna.samplers.RandomSampler(seed=seed))
    study = optuna.create_study(directions=["maximize", "minimize"])
    for number in range(2):
        trial = study.ask(gated.problem.distributions)
        outcome = gated.bench.measure(number, trial.params)
        found = {"figure": 0.5, "limit": 0.6, "excess": 0.1, "outcome": "over"}
        first = {**found, "figure": outcome.ppl, "excess": outcome.excess}
        outcome.gates = {"exact": found, "ppl": first} if number else {"ppl": first, "exact": None}
        tell(study, outcome)
    shadow = sampler._shadow(study, study.ask(gated.problem.distributions))
    shown = [list(t.constraints) for t in shadow.get_trials(states=[TrialState.COMPLETE])]
    assert shown == [["ppl", "exact"], ["ppl", "exact"]]


def test_each_trial_says_why_it_was_asked(gated):
    reasons = [t.user_attrs.get(WHY, "") for t in gated.study.get_trials()]
    assert reasons[0] == "" and all(reasons[1:])  # the first is the study's own default
    for kind in ("ceiling's edge", "to know the knobs apart", "most expected hypervolume a second", "on all prompts"):
        assert any(kind in reason for reason in reasons), kind
    chosen = [t for t in gated.study.get_trials() if "hypervolume" in t.user_attrs.get(WHY, "")]
    assert all(0 <= t.user_attrs[GAIN] < 1 for t in chosen)


def test_searchers_that_ask_at_once_do_not_measure_the_same(gated):
    asked = [gated.ask(seed).params for seed in range(4)]
    assert len({tuple(a.values()) for a in asked}) == 4
    early = Replayed(A10G, "gated", 2)
    at_once = [early.ask(seed).params[WINDOW] for seed in range(3)]
    assert len(set(at_once)) > 1  # not all at the same place of the bracket


def test_what_is_asked_hangs_on_the_seed_and_on_nothing_else(gated):
    past = gated.history()
    first, again, other = (propose(gated.problem, past, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert first == again and first.setting != other.setting


def test_an_ask_is_quick_at_sixty_trials():
    study = Replayed(MINIATURE, "random", 60)
    started = time.perf_counter()
    for seed in range(3):
        propose(study.problem, study.history(), np.random.default_rng(seed))
    assert (time.perf_counter() - started) / 3 < 1.0  # 0.2 s on an idle core


def test_optunas_gp_is_shown_what_was_over_the_ceiling():
    study = Replayed(A10G, "random", 25)
    sampler = make_sampler("gp", study.problem, 0)
    assert isinstance(sampler, ShadowSampler)
    shadow = sampler._shadow(study.study, study.ask()._cached_frozen_trial).get_trials(states=(TrialState.COMPLETE,))
    over = [t for t in study.study.get_trials() if t.state == TrialState.PRUNED]
    assert over and len(shadow) == 25
    assert sum(t.constraints["ppl"] > 0 for t in shadow) == len(over)
    timed = {t.values[0] for t in shadow if t.constraints["ppl"] <= 0}
    assert {t.values[0] for t in shadow if t.constraints["ppl"] > 0} <= timed  # nobody measured another speed


def test_errors_of_trials_with_the_same_texts_are_shared_as_nested_samples_share_them():
    from search.samplers.forecast import SHARED, TEXTS_SD, errors

    found = errors(["a", "a", "b"], [0.02, 0.06, 0.02])
    assert found[0, 1] == pytest.approx(SHARED * 0.02**2 + TEXTS_SD**2) and found[0, 2] == 0
    assert np.diag(found) == pytest.approx(np.array([0.02, 0.06, 0.02]) ** 2 + TEXTS_SD**2)
    assert np.linalg.eigvalsh(errors(list("aabbc"), [0.02, 0.06, 0.01, 0.2, 0.03])).min() > 0


def test_the_expected_gain_of_hypervolume_is_that_of_a_simulation():
    from search.samplers.models import Prediction, hypervolume_gain

    draw = np.random.default_rng(0)
    front = np.array([[6.0, 0.80], [6.2, 0.85], [6.3, 0.88]])  # ln TPS, ln perplexity
    worst, least = (5.0, 1.0), 0.8
    expected = Prediction(*(np.array([x]) for x in (6.25, 0.1, 0.84, 0.01)))

    def spanned(points):
        best, total, order = worst[0], 0.0, points[np.argsort(points[:, 1])]
        for (_, ppl), after in zip(order, [*order[1:, 1], worst[1]], strict=True):
            best = max(best, order[order[:, 1] <= ppl, 0].max())
            total += max(0.0, min(after, worst[1]) - ppl) * (best - worst[0])
        return total

    drawn = np.column_stack([draw.normal(6.25, 0.1, 4000), draw.normal(0.84, 0.01, 4000)])
    gains = [spanned(np.vstack([front, point])) - spanned(front) for point in drawn]
    simulated = np.mean(gains) / (worst[1] - least)
    error = np.std(gains) / math.sqrt(len(gains)) / (worst[1] - least)
    assert hypervolume_gain(expected, front, worst, least)[0] == pytest.approx(simulated, abs=4 * error)


def test_a_model_predicts_between_what_it_was_shown_and_knows_where_it_does_not_know():
    from search.samplers import models

    points = np.linspace(0, 1, 12)[:, None] * np.ones((1, 2))
    process = models.fit(points, np.sin(3 * points[:, 0]), np.diag(np.full(12, 0.01**2)))
    mean, sd = process.predict(np.array([[0.55, 0.55], [0.0, 1.0]]))
    assert mean[0] == pytest.approx(math.sin(1.65), abs=0.02) and sd[1] > 3 * sd[0]
    believing = models.with_beliefs(process, np.array([[0.0, 1.0]]))
    assert believing.predict(np.array([[0.0, 1.0]]))[1][0] < sd[1] / 3
    assert process.predict(np.array([[0.5, 0.5]]), relative_to=np.array([0.5, 0.5]))[1][0] < 1e-4


def test_it_ends_by_itself_once_another_trial_is_not_worth_it():
    steps = replay(A10G, GATED, 0, 120, stop=True)
    assert 10 < len(steps) < 80
    assert 1 - steps[-1].confirmed / optimum(A10G, 0) < 0.01
    nothing = replay(LANDSCAPES["unreachable"], GATED, 0, 60, stop=True)
    assert len(nothing) < 20 and all(step.state == "PRUNED" for step in nothing)
    assert worth_another([])


@pytest.mark.parametrize("landscape", ["a10g", "miniature"])
def test_forty_trials_come_close_to_the_fastest_that_passes(landscape):
    steps = replay(LANDSCAPES[landscape], GATED, 1, 40)
    assert 1 - steps[-1].finalist / optimum(LANDSCAPES[landscape], 1) < 0.01  # medians of twenty: studies/samplers
    assert sum(s.state == "PRUNED" for s in steps) <= 4


PUBLIC = str(PUBLIC_POINTS)


def test_the_public_points_propose_the_neighbourhood_of_the_winner():
    problem = problem_of(A10G, read_prior(PUBLIC, A10G.knobs))
    assert len(problem.prior) == 171
    first = [p.setting for p in proposals(problem)]
    assert 1 <= len(first) <= 4
    near = [s for s in first if abs(s[WINDOW] - 188) <= 16 and 36 <= s[TOP_K] <= 64 and s[DRAFTS] == 7]
    assert near, first
    steps = replay(A10G, GATED, 0, 5, prior=problem.prior)
    assert {tuple(s.values()) for s in first} <= {tuple(step.setting.values()) for step in steps}


def test_points_of_other_weights_or_broken_ones_do_not_count():
    problem = problem_of(A10G, read_prior(PUBLIC, A10G.knobs))
    kept = settled(problem)
    assert all(p.ppl is None or 2.3 < p.ppl < 3 for p in kept)
    assert not any(p.setting[TOP_K] > 128 for p in kept)
    assert len({tuple(p.setting.values()) for p in kept}) == len(kept) < 60


def test_a_prior_is_never_a_measurement_and_does_not_mislead_on_another_card():
    other = LANDSCAPES["other-card"]
    prior = read_prior(PUBLIC, other.knobs)
    steps = replay(other, GATED, 0, 40, prior=prior)
    assert len(steps) == 40  # each of them measured here
    assert 1 - steps[-1].finalist / optimum(other, 0) < 0.02  # with 4 trials lost to what did best elsewhere


def test_a_prior_may_be_another_study(searched, study_folder, capsys):
    arguments = ["--study", str(study_folder), "--engine", "simulated", "--trials", "3", "--seed", "1"]
    arguments += ["--storage", f"sqlite:///{study_folder}/s.db", "--logs", str(study_folder / "logs")]
    assert run.main([*arguments, "--prior", searched]) == 0
    said = "".join(capsys.readouterr())
    assert "Prior:" in said and "Tried first: window" in said
    trials = optuna.load_study(study_name="synthetic-simulated", storage=f"sqlite:///{study_folder}/s.db").get_trials()
    assert "best elsewhere (--prior)" in trials[1].user_attrs[WHY]


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "cannot be read"), ("a,b\n1,2\n", "holds no row with numbers for sliding_window")],
)
def test_a_prior_that_cannot_be_used_says_why(tmp_path, text, says):
    file = tmp_path / "points.csv"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=says):
        read_prior(str(file), A10G.knobs)


def test_a_leader_by_luck_is_measured_again_on_all_prompts(gated):
    study = gated
    repeated = [t for t in study.study.get_trials() if asked_on_all(study.study, t)]
    assert repeated
    best = max((m for m in study.history().timed), key=lambda m: m.tps)
    latest = [m for m in study.history().timed if m.setting == best.setting][-1]
    assert latest.sd <= 0.005  # the one that leads was timed on all prompts


def test_a_study_of_speed_knobs_alone_is_searched_too():
    landscape = dataclasses.replace(A10G, knobs=A10G.knobs[1:])
    steps = replay(landscape, GATED, 0, 12)
    assert {s.state for s in steps} == {"COMPLETE"} and len({tuple(s.setting.values()) for s in steps}) >= 10


def test_nsga2_breeds_and_is_not_the_random_draw():
    bred, drawn = (Replayed(MINIATURE, name, 45).study.get_trials() for name in ("nsga2", "random"))
    assert any("generation" in key for trial in bred for key in trial.system_attrs)
    assert [t.params for t in bred[25:]] != [t.params for t in drawn[25:]]


def test_a_first_proposal_needs_no_history():
    empty = propose(problem_of(A10G), History((), ()), np.random.default_rng(0))
    assert set(empty.setting) == {WINDOW, TOP_K, DRAFTS} and empty.why
