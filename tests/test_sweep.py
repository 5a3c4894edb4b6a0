"""Result folders of `vllm bench sweep serve`, written by vLLM's own code around a server that is made up."""

import itertools
import json
from pathlib import Path

import optuna
import pytest

from search import run
from search.errors import UsageError
from search.knobs import DRAFTS, WINDOW, Knob
from search.samplers.prior import WHY, enqueue, proposals, read_prior
from search.samplers.problem import PriorPoint, Problem, Reference
from search.sweep import read_sweep

KNOBS = (Knob(WINDOW, 64, 512, 64), Knob(DRAFTS, 0, 10))
SPEEDS = {0: 200.0, 2: 280.0, 4: 300.0, 8: 260.0}
FORMS = {  # of one setting, as people write a sweep's parameters
    "nested": lambda w, k: {"hf_overrides": {"text_config": {WINDOW: w}}, "speculative_config": {DRAFTS: k}},
    "dotted": lambda w, k: {f"hf-overrides.{WINDOW}": w, f"speculative-config.{DRAFTS}": k},
    "json": lambda w, k: {"--hf-overrides": json.dumps({WINDOW: w}), "speculative_config": json.dumps({DRAFTS: k})},
}


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Run vLLM's sweep over parameters, with a benchmark that writes its file and measures what SPEEDS says."""
    serve = pytest.importorskip("vllm.benchmarks.sweep.serve")
    from vllm.benchmarks.sweep.param_sweep import ParameterSweep

    class MadeUpServer:
        def __init__(self, command, *_, **__):
            text = " ".join(command)
            self.drafts = max((k for k in SPEEDS if f'{DRAFTS}": {k}' in text or f"{DRAFTS} {k}" in text), default=0)

        def __enter__(self):
            return self

        def __exit__(self, *_): ...

        def wait_until_ready(self, timeout): ...

        def after_bench(self): ...

        def run_subcommand(self, command):
            asked = dict(itertools.pairwise(command))
            streams = int(asked["--max-concurrency"]) if "--max-concurrency" in asked else None
            measured = {"completed": 8, "failed": 0, "num_prompts": 8, "max_concurrency": streams, "errors": [""] * 8}
            file = Path(asked["--result-dir"]) / asked["--result-filename"]
            file.write_text(json.dumps({**measured, "output_throughput": SPEEDS[self.drafts] * (streams or 8)}))

    monkeypatch.setattr(serve, "ServerProcess", MadeUpServer)

    def sweep(parameters, bench):
        folder = tmp_path / "results" / "20261130_120000"
        folder.mkdir(parents=True)
        serve.run_combs(
            serve_cmd=["vllm", "serve", "m"],
            bench_cmd=["vllm", "bench", "serve"],
            after_bench_cmd=[],
            show_stdout=False,
            server_ready_timeout=1,
            serve_params=ParameterSweep.from_records(parameters),
            bench_params=ParameterSweep.from_records(bench),
            link_vars=[],
            experiment_dir=folder,
            num_runs=2,
            warmup_num_prompts=1,
            dry_run=False,
        )
        return folder

    return sweep


@pytest.mark.parametrize("form", FORMS)
def test_every_run_of_one_stream_is_a_point_whatever_its_parameters_look_like(swept, form):
    parameters = [FORMS[form](w, k) for w in (256, 512) for k in SPEEDS]
    folder = swept(parameters, [{"max_concurrency": 1}, {"max_concurrency": 4}])
    points = read_prior(str(folder), KNOBS)
    assert len(points) == 2 * len(parameters)  # its two runs; neither the warm-up nor runs of four streams
    assert {(p.setting[WINDOW], p.setting[DRAFTS], p.tps, p.ppl) for p in points} == {
        (w, k, tps, None) for w in (256, 512) for k, tps in SPEEDS.items()
    }


def test_what_a_sweep_found_at_the_models_own_window_is_proposed_and_no_other_as_its_perplexity_is_not_known(swept):
    folder = swept([FORMS["nested"](w, k) for w in (64, 512) for k in SPEEDS], [{"max_concurrency": 1}])
    reference = Reference({WINDOW: 512, DRAFTS: 0}, ppl=4.0, tps=100.0)
    found = proposals(Problem(KNOBS, 4.2, reference, read_prior(str(folder), KNOBS)))
    assert [(p.setting, p.ppl) for p in found] == [({WINDOW: 512, DRAFTS: 4}, 4.0)]


def test_points_from_elsewhere_are_tried_on_the_studys_own_steps():
    knobs = Knob(WINDOW, 32, 512, step=32), Knob(DRAFTS, 0, 10)
    reference = Reference({WINDOW: 512, DRAFTS: 0}, ppl=4.0, tps=100.0)
    point = PriorPoint({WINDOW: 301, DRAFTS: 4}, tps=500.0, ppl=4.1, count=1)
    study = optuna.create_study(directions=["maximize", "minimize"])
    enqueue(study, Problem(knobs, 4.2, reference, (point,)), lambda _: None)
    assert study.get_trials()[0].system_attrs["fixed_params"] == {WINDOW: 288, DRAFTS: 4}


def test_a_search_begins_with_what_the_sweep_found(swept, edit_study):
    folder = swept([FORMS["dotted"](512, k) for k in SPEEDS], [{"max-concurrency": 1}])
    study = edit_study("  centroid_top_k: {low: 1, high: 128, log: true}\n", "")
    url = f"sqlite:///{study}/s.db"
    where = ["--study", str(study), "--engine", "simulated", "--storage", url, "--logs", str(study / "logs")]
    assert run.main([*where, "--trials", "2", "--confirm", "0", "--prior", str(folder)]) == 0
    trials = optuna.load_study(study_name="synthetic-simulated", storage=url).get_trials()
    (first,) = [trial for trial in trials if "best elsewhere (--prior)" in trial.user_attrs.get(WHY, "")]
    assert first.params == {WINDOW: 512, DRAFTS: 4}


def test_requests_that_failed_make_a_run_no_point(swept):
    folder = swept([FORMS["nested"](512, k) for k in SPEEDS], [{"max_concurrency": 1}])
    for number, file in enumerate(sorted(folder.rglob("run=0.json"))):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"failed": number}))
    assert len(read_sweep(folder)) == 2 * len(SPEEDS) - 3


def test_a_sweep_of_many_streams_is_refused(swept):
    folder = swept([FORMS["nested"](512, 4)], [{}])
    with pytest.raises(UsageError, match="holds 2 runs, none of one stream.*--max-concurrency 1"):
        read_sweep(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "holds no run=N.json: it is no result folder of vllm bench sweep serve"),
        (b"[1]", "run=0.json is no result of vllm bench serve: it has no output_throughput"),
        (b"{\xff", "run=0.json is no result"),
        (b"[" * 100_000, "run=0.json is no result"),
        (b'{"output_throughput": 5, "max_concurrency": 1}', "holds no row with numbers for sliding_window"),
        (b'{"output_throughput": "{", "max_concurrency": 1}', "holds no row with numbers for sliding_window"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(tmp_path, text, says):
    if text is not None:
        (tmp_path / "SERVE--a=1").mkdir()
        (tmp_path / "SERVE--a=1" / "run=0.json").write_bytes(text)
    with pytest.raises(UsageError, match=says):
        read_prior(str(tmp_path), KNOBS)
