"""The bench of many searchers on one database, with two of them."""

import json
import subprocess

import pytest
from conftest import ROOT

from search.store import Store, open_engine


def test_the_bench_says_how_many_trials_two_searchers_finish_and_goes_on_where_it_stopped(postgres, python, tmp_path):
    postgres.psql("CREATE DATABASE bench")
    url = postgres.get_uri("bench")

    def bench(trials):
        command = [python, "studies/cluster_bench.py", "--searchers", "2", "--trials", str(trials), "--takes", "0.2"]
        command += ["--storage", url, "--folder", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=100)
        return json.loads(done.stdout)

    first, second = bench(12), bench(20)
    assert (first["trials"], first["of"]) == (12, 12) and (second["trials"], second["of"]) == (8, 20)
    assert first["trials_a_second"] == pytest.approx(first["trials"] / first["wall_s"], rel=0.1)
    assert 0 < first["efficiency"] <= 1.2  # a trial that was measured before takes no 0.2 s
    assert 0 < first["ask_and_tell_ms"]["p50"] <= first["ask_and_tell_ms"]["p95"]
    assert Store(open_engine(url), "bench-simulated").finished() == 20
