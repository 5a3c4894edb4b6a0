"""Comparisons on public A10G runs, whose repeated jobs show what a re-run really does (see tests/data/README.md)."""

import csv
import gzip
import itertools
import math
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from search.speed import PromptTiming, compare, throughput

RUN_SD = 0.0016  # of ln TPS between processes that decode the same tokens, all prompts alike
DATA = Path(__file__).parent / "data" / "a10g_prompt_latencies.csv.gz"


@pytest.fixture(scope="module")
def manifests():
    """Runs by manifest: prompt timings by run name."""
    found = defaultdict(lambda: defaultdict(list))
    with gzip.open(DATA, "rt") as file:
        for row in csv.DictReader(file):
            timing = PromptTiming(row["prompt"], int(row["output_tokens"]), float(row["latency_s"]), row["output_hash"])
            found[row["sliding_window"]][row["run"]].append(timing)
    return found


def pairs(manifests):
    return [pair for runs in manifests.values() for pair in itertools.combinations(runs.values(), 2)]


def same_path(one, other):
    return all(a.output_hash == b.output_hash for a, b in zip(one, other, strict=True))


def test_the_stated_spread_between_runs_is_what_runs_of_one_token_path_show(manifests):
    ratios = [math.log(throughput(a) / throughput(b)) for a, b in pairs(manifests) if same_path(a, b)]
    assert len(ratios) >= 10
    assert math.sqrt(statistics.fmean(r * r for r in ratios) / 2) == pytest.approx(RUN_SD, rel=0.25)


@pytest.mark.parametrize("same_output", [False, True])
def test_runs_of_one_manifest_are_called_different_no_more_often_than_stated(manifests, same_output):
    found = [compare(a, b, math.sqrt(2) * RUN_SD, same_output=same_output) for a, b in pairs(manifests)]
    intervals = [comparison.interval() for comparison in found if comparison is not None]
    different = sum(not low <= 1 <= high for low, high in intervals)
    print(f"{different} of {len(intervals)} pairs of one manifest called different (same output only: {same_output})")
    assert len(intervals) == 51
    assert different / len(intervals) <= 0.05 + 0.02


def test_identical_outputs_make_the_comparison_sharper(manifests):
    for a, b in pairs(manifests):
        if not same_path(a, b):
            assert compare(a, b, same_output=True).error < compare(a, b).error


def test_ten_drafts_a_step_are_found_slower_than_seven_on_the_prompts_that_decoded_alike():
    """The sharpest comparison of two K that the public runs allow: they hold none of K = 8 beside one of K = 7."""
    runs = defaultdict(list)
    with gzip.open(DATA.with_name("a10g_drafts.csv.gz"), "rt") as file:
        for row in csv.DictReader(file):
            timing = PromptTiming(row["prompt"], int(row["output_tokens"]), float(row["latency_s"]), row["output_hash"])
            runs[row["num_speculative_tokens"]].append(timing)
    alike = sum(a.output_hash == b.output_hash for a, b in zip(runs["10"], runs["7"], strict=True))
    found = compare(runs["10"], runs["7"], math.sqrt(2) * RUN_SD, same_output=True)
    low, high = found.interval()
    print(f"K = 10 ÷ K = 7: {math.exp(found.log_ratio):.4f} ({low:.4f} to {high:.4f}), {alike} prompts")
    assert alike == 96
    assert 0.95 < low < high < 0.98
