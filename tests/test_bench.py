"""The comparison of samplers: equal luck for all, gone on with where it stopped, and what it prints."""

import csv
import subprocess

import pytest
from conftest import ROOT

from search.bench.compare import AT_UNITS, read_runs, run, unit_s
from search.bench.figure import figure
from search.bench.replay import Bench, optimum, replay
from search.bench.variants import BY_LABEL, Variant
from search.knobs import DRAFTS, TOP_K, WINDOW
from search.landscapes import A10G, LANDSCAPES, MINIATURE

SETTING = {WINDOW: 256, TOP_K: 32, DRAFTS: 4}
SHORT = Variant("random", BY_LABEL["random"].make, 30)


def test_a_machine_is_alike_for_every_sampler():
    first, again = Bench(A10G, 3).measure(0, SETTING), Bench(A10G, 3).measure(0, SETTING)
    assert (first.tps, first.ppl, first.wall_s) == (again.tps, again.ppl, again.wall_s)
    assert Bench(A10G, 4).measure(0, SETTING).tps != first.tps


def test_a_gate_is_paid_once_a_window_and_a_known_setting_costs_nothing():
    bench = Bench(A10G, 0)
    first = bench.measure(0, SETTING)
    other = bench.measure(1, {**SETTING, TOP_K: 64})
    assert first.wall_s > A10G.costs.gate_s > other.wall_s > 0
    again = bench.measure(2, SETTING)
    assert again.wall_s == 0 and again.reused_from == 0 and again.tps == first.tps
    on_all = bench.measure(3, {**SETTING, TOP_K: 64}, on_all=True)
    assert on_all.reused_from is None and on_all.tps_high / on_all.tps_low < other.tps_high / other.tps_low
    over = bench.measure(4, {**SETTING, WINDOW: 64})
    assert over.state == "PRUNED" and over.tps is None and over.excess > 0 and over.wall_s < A10G.costs.gate_s


def test_the_optimum_is_what_an_exhaustive_look_finds():
    bench = Bench(MINIATURE, 0)
    passing = [s for s in MINIATURE.settings() if bench.perplexity(s) <= MINIATURE.ceiling]
    assert optimum(MINIATURE, 0) == max(map(MINIATURE.tps, passing))
    best = max(passing, key=MINIATURE.tps)
    assert (best[WINDOW], best[DRAFTS]) == (112, 4)


def test_a_run_is_summed_up_by_what_stood_at_each_time():
    found = run(MINIATURE, SHORT, 0)
    steps = replay(MINIATURE, SHORT.make, 0, 30)
    assert found.trials == 30 and found.seconds == pytest.approx(steps[-1].seconds, abs=0.1)
    best = optimum(MINIATURE, 0)
    stood = [s for s in steps if s.seconds <= AT_UNITS[0] * unit_s(MINIATURE)][-1]
    assert float(found.at_units.split()[0]) == pytest.approx(1 - stood.confirmed / best, abs=1e-5)
    assert found.at_trials.split()[1] != "-" and found.at_trials.split()[3] == "-"  # 20 and 80 trials


def test_it_prints_a_table_and_goes_on_with_what_is_missing(python, tmp_path):
    command = [python, "-m", "search.bench", "samplers", "--out", str(tmp_path), "--samplers", "random"]
    command += ["--landscapes", "miniature", "unreachable"]
    first = subprocess.run([*command, "--seeds", "1"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "### miniature" in first.stdout and "| random | 1 |" in first.stdout
    assert "miniature, random, seed 0: 200 trials, regret" in first.stderr
    figure_file = tmp_path / "figure.html"
    more = [*command, "--seeds", "2", "--figure", str(figure_file)]
    second = subprocess.run(more, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "seed 0" not in second.stderr and "seed 1" in second.stderr and "| random | 2 |" in second.stdout
    with (tmp_path / "runs.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 4
    assert "plotly" in figure_file.read_text()
    assert len(figure(read_runs(tmp_path / "runs.csv")).data) == 1  # nothing passes on the other


@pytest.mark.parametrize(("option", "says"), [("--landscapes", "a10g, miniature"), ("--samplers", "gated, random")])
def test_an_unknown_name_is_refused_with_those_there_are(python, option, says):
    command = [python, "-m", "search.bench", "samplers", option, "nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and says in done.stderr


def test_every_variant_names_landscapes_that_there_are():
    for variant in BY_LABEL.values():
        assert set(variant.landscapes) <= set(LANDSCAPES)
        assert variant.prior is None or variant.prior.is_file()
