"""Knobs that take a new engine: read, planned, searched on the simulated engine."""

import dataclasses
import json
import math
import random
import re
from types import SimpleNamespace

import pytest

from search import builds, run
from search.builds import BuildKnob
from search.checkup import _engines
from search.engine.live import built_values
from search.engine.simulated import BROKEN, BUILD_SPREAD, _hash
from search.errors import UsageError
from search.knobs import METHOD
from search.manifest import environment_keys
from search.spec import read_study
from search.store import REFERENCE, Store, open_engine

SPECULATION = "  speculation:\n    ngram: {prompt_lookup_max: 4}\n  args:"
METHODS = "  method: {choices: [mtp, ngram, none]}\n"


@pytest.fixture
def with_knobs(study_folder):
    """Adds lines to the study's knobs, and a second method of speculation to its engine."""

    def add(lines, *, speculation=False):
        file = study_folder / "study.yaml"
        text = file.read_text().replace("knobs:\n", f"knobs:\n{lines}")
        file.write_text(text.replace("  args:", SPECULATION) if speculation else text)
        return study_folder

    return add


def searched(folder, *more, trials=24):
    url = f"sqlite:///{folder}/study.db"
    arguments = ["--study", str(folder), "--engine", "simulated", "--storage", url, "--trials", str(trials)]
    code = run.main([*arguments, "--logs", str(folder / "logs"), "--seed", "1", *more])
    return code, Store(open_engine(url), "synthetic-simulated")


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("block_size: {choices: [16, 32]}", (16, 32)),
        ("gpu_memory_utilization: {low: 0.5, high: 0.9, step: 0.2}", (0.5, 0.7, 0.9)),
        ("max_num_batched_tokens: {low: 64, high: 4096, log: true, points: 4}", (64, 256, 1024, 4096)),
        ("swap_space: {low: 0.1, high: 10.0, log: true, points: 3}", (0.1, 1.0, 10.0)),
        ("enforce_eager: {choices: [true, false], default: false}", (True, False)),
        ("compilation_config.mode: {low: 0, high: 3, step: 1}", (0, 1, 2, 3)),
    ],
)
def test_any_argument_of_the_engine_may_be_a_knob(with_knobs, line, values):
    (knob,) = read_study(with_knobs(f"  {line}\n")).build_knobs
    assert knob.values == values and knob.default in values
    assert [type(v) for v in knob.values] == [type(v) for v in values]
    assert knob.affects_quality and knob.affects_speed  # nothing else being said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("block_size: {choices: []}", "must be 1 to 64 values"),
        ("block_size: {choices: [16, 16]}", "must be 1 to 64 values"),
        ("block_size: {choices: [16], default: 32}", "default (32) is no value of it"),
        ("block_size: {choices: [[1]]}", "must hold numbers, texts, true or false"),
        ("block_size: {low: 16}", "block_size.high is missing (or give choices)"),
        ("block_size: {low: 0, high: 8, log: true}", "above 0 for log"),
        ("block_size: {low: 0, high: 8, step: 0}", "takes a step above 0"),
        ("block_size: {low: 0, high: 1000, step: 1}", "each of which takes a new engine"),
        ("block_size: {choices: [16], affects: nothing}", "must be quality, speed or both"),
        ("block_size: {choices: [16], when: {dtype: auto}}", "must be a knob above it"),
        ("method: {choices: [mtp, ngram]}", "'ngram' is not one of none, mtp"),
        ("hf_overrides: {choices: [a]}", "cannot be searched"),
        ("env.HF_TOKEN: {choices: [a]}", "would store a secret"),
        ("model: {choices: [./nowhere]}", "no model in"),
        ("slidng_window: {choices: [16]}", "did you mean sliding_window"),
    ],
)
def test_a_mistake_in_a_build_knob_is_named(with_knobs, line, says):
    folder = with_knobs(f"  {line}\n")
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        read_study(folder)
    assert "line 7" in str(caught.value)


def test_two_methods_of_speculation_have_to_be_told_apart(with_knobs):
    with pytest.raises(UsageError, match=r"several methods of speculation \(mtp and ngram\): make method a knob"):
        read_study(with_knobs("", speculation=True))


def test_a_conditional_knob_makes_no_builds_where_it_does_not_count():
    knobs = (
        BuildKnob(METHOD, ("mtp", "ngram", "none"), "mtp", affects_quality=False),
        BuildKnob("speculation.prompt_lookup_max", (2, 4), 4, when={METHOD: ("ngram",)}),
        BuildKnob("block_size", (16, 32), 16),
    )
    found = list(builds.all_builds(knobs))
    assert len(found) == 8 and len({json.dumps(build) for build in found}) == 8
    assert {"speculation.prompt_lookup_max" in build for build in found if build[METHOD] != "ngram"} == {False}
    assert builds.base(knobs) == {METHOD: "mtp", "block_size": 16}


def test_values_reach_the_engine_where_they_belong(with_knobs):
    knobs = (
        f"{METHODS}  compilation_config.mode: {{choices: [0, 3]}}\n  env.VLLM_X: {{choices: [0, 1]}}\n"
        "  speculation.prompt_lookup_max: {choices: [2, 3], when: {method: ngram}}\n"
    )
    spec = read_study(with_knobs(knobs, speculation=True))
    build = {METHOD: "ngram", "compilation_config.mode": 3, "env.VLLM_X": 1, "speculation.prompt_lookup_max": 3}
    load = spec.load({**build, "num_speculative_tokens": 4, "sliding_window": 64}, seed=0)
    assert load.build == build and load.drafter is None
    assert load.speculation == {"method": "ngram", "prompt_lookup_max": 3}
    assert load.build_args == {"compilation_config": {"mode": 3}} and load.environment == {"VLLM_X": "1"}
    assert load.args == spec.engine.args  # what is hashed as the study's own
    assert "centroid_top_k" not in load.limits and load.limits["num_speculative_tokens"] > 0
    plain = spec.load({METHOD: "none"}, seed=0)
    assert plain.limits == {"sliding_window": 512} and plain.speculation == {} and plain.drafter is None
    assert spec.load({METHOD: "mtp"}, seed=0).drafter == "example/drafter"


def test_a_knob_of_ours_stands_for_arguments_of_the_engine(with_knobs):
    spec = read_study(with_knobs("  kv_cache_gib: {choices: [0.25, 1]}\n"))
    assert spec.load({"kv_cache_gib": 0.25}, seed=0).build_args == {"kv_cache_memory_bytes": 1 << 28}


def test_a_plan_gives_every_build_its_share_and_returns_to_none():
    knobs = (BuildKnob("a", (1, 2, 3), 2), BuildKnob("b", (False, True), False))
    plan = builds.plan(knobs, 60, has_live=True, seed=0)
    assert plan.builds[0] == {"a": 2, "b": False} and len(plan.builds) == 6 and plan.shares == (10,) * 6
    counts, order, here = [0] * 6, [], None
    while (number := plan.following(counts, set(), here, set())) is not None:
        order += [number] if number != here else []
        here = number
        counts[number] += 1
    assert order == [0, 1, 2, 3, 4, 5] and counts == [10] * 6
    few = builds.plan(knobs, 20, has_live=True, seed=0)
    assert len(few.builds) == 2 and sum(few.shares) == 20
    assert len(builds.plan(knobs, 20, has_live=False, seed=0).builds) == 6  # one trial each would do


def test_what_a_closed_build_leaves_goes_to_the_others():
    plan = builds.plan((BuildKnob("a", (1, 2, 3), 1),), 30, has_live=True, seed=0)
    assert plan.following([10, 0, 0], {1}, 0, set()) == 0  # it gets more
    assert plan.following([15, 0, 0], {1}, 0, set()) == 2
    assert plan.following([15, 0, 0], {1}, 0, {2}) == 2  # there is no other
    assert plan.following([10, 0, 0], set(), 0, {1}) == 2  # another searcher is at 1
    assert plan.following([15, 0, 15], {1}, 2, set()) is None


def test_engines_start_no_more_often_than_there_are_builds(with_knobs, capsys):
    folder = with_knobs(
        f"{METHODS}  max_num_batched_tokens: {{choices: [256, 512], affects: speed}}\n", speculation=True
    )
    code, store = searched(folder, "--sampler", "random", "--json", trials=48)
    assert code == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    spec = read_study(folder)
    outcomes = [o for o in store.outcomes() if o.state != "FAIL"]
    assert len(outcomes) == 48
    assert found["engine_starts"] == len({json.dumps(spec.build_of(o.setting)) for o in outcomes}) == 6
    of_ngram = [o for o in outcomes if o.setting[METHOD] == "ngram"]
    assert of_ngram and all("centroid_top_k" not in o.setting for o in of_ngram)
    assert all(o.setting["num_speculative_tokens"] == 0 for o in outcomes if o.setting[METHOD] == "none")
    assert store.outcome(REFERENCE).setting[METHOD] == "mtp"


def test_each_engine_begins_with_what_did_best_before(with_knobs):
    folder = with_knobs("  max_num_batched_tokens: {choices: [256, 512], affects: speed}\n")
    _, store = searched(folder, "--sampler", "random", trials=20)
    outcomes = [o for o in store.outcomes() if o.state != "FAIL"]
    first = next(o for o in outcomes if o.setting["max_num_batched_tokens"] == 512)
    best = max((o for o in outcomes[: outcomes.index(first)] if o.tps), key=lambda o: o.tps)
    assert {**first.setting, "max_num_batched_tokens": 256} == best.setting


def test_an_engine_that_does_not_start_costs_one_failure_and_not_the_search(with_knobs, capsys):
    folder = with_knobs(f"  block_size: {{choices: [16, {BROKEN}, 32]}}\n")
    code, store = searched(folder, "--sampler", "random", trials=24)
    assert code == 0
    failed = [o for o in store.outcomes() if o.state == "FAIL"]
    assert [o.setting["block_size"] for o in failed] == [BROKEN] and failed[0].failed_stage == "build"
    counts = [o.setting["block_size"] for o in store.outcomes() if o.state != "FAIL"]
    assert counts.count(16) == counts.count(32) == 12
    assert "made up not to start" in "".join(capsys.readouterr())


def test_a_search_goes_on_with_the_engine_that_it_was_at(with_knobs, capsys):
    folder = with_knobs("  max_num_batched_tokens: {choices: [256, 512], affects: speed}\n")
    _, store = searched(folder, "--sampler", "random", trials=20)
    last = store.outcomes()[-1].setting["max_num_batched_tokens"]
    capsys.readouterr()
    _, store = searched(folder, "--sampler", "random", "--json", trials=40)
    assert last == 512 and [o.setting["max_num_batched_tokens"] for o in store.outcomes()[20:30]] == [last] * 10
    assert json.loads(capsys.readouterr().out)["engine_starts"] == 2
    assert searched(folder, "--json", trials=40)[0] == 0  # nothing is left to do
    assert json.loads(capsys.readouterr().out)["engine_starts"] <= 1


def test_a_build_that_affects_quality_is_gated_by_itself(with_knobs):
    folder = with_knobs("  kv_cache_dtype: {choices: [auto, fp8]}\n")
    _, store = searched(folder, "--sampler", "random", trials=24)
    by_window = {}
    for o in store.outcomes():
        if o.state == "COMPLETE":
            by_window.setdefault(o.setting["kv_cache_dtype"], {})[o.setting["sliding_window"]] = o.ppl
    common = by_window["auto"].keys() & by_window["fp8"].keys()
    assert all(by_window["fp8"][w] > by_window["auto"][w] for w in common)
    assert len(store.measurements("gate", "done")) >= len(by_window["auto"]) + len(by_window["fp8"])


def test_a_manifest_carries_the_build(with_knobs, monkeypatch):
    knobs = f"{METHODS}  block_size: {{choices: [16, 32]}}\n  env.VLLM_X: {{choices: [0, 1]}}\n"
    spec = read_study(with_knobs(knobs, speculation=True))
    keys = environment_keys(spec, {METHOD: "ngram", "block_size": 32, "env.VLLM_X": 1, "num_speculative_tokens": 3})
    assert keys["VLLM_X"] == "1" and json.loads(keys["ENGINE_ARGS"])["block_size"] == 32
    assert json.loads(keys["SPECULATIVE_CONFIG"]) == {
        "method": "ngram",
        "prompt_lookup_max": 4,
        "num_speculative_tokens": 3,
    }
    assert "SPECULATIVE_CONFIG" not in environment_keys(spec, {METHOD: "none", "num_speculative_tokens": 0})


def test_the_report_shows_what_engines_were_built_with(with_knobs, capsys):
    from search.report import figures, page
    from search.store.frames import frames

    folder = with_knobs(f"{METHODS}", speculation=True)
    _, store = searched(folder, "--sampler", "random", trials=30)
    study = frames(store)
    assert study.knobs[-1] == METHOD
    shown = page.render(study, [])
    assert "method ngram" in shown or "method mtp" in shown or "method none" in shown
    assert {f.name for f in figures.all_figures(study)} >= {"front", "knobs", "importance"}


def test_methods_are_compared_and_one_that_loses_is_said_to(with_knobs, capsys):
    folder = with_knobs(METHODS, speculation=True)
    searched(folder, "--sampler", "random", "--json", trials=30)
    out, err = capsys.readouterr()
    methods = json.loads(out.splitlines()[-1])["methods"]
    assert methods.keys() == {"mtp", "ngram", "none"} and methods["mtp"] > methods["none"]
    assert f"mtp {methods['mtp']:.1f} tok/s" in err


def test_a_method_that_does_not_pay_is_said_to():
    from search.closing import _methods

    class Found:
        methods = {"mtp": 200.0, "ngram": 90.0, "none": 110.0}  # noqa: RUF012
        reference = type("Reference", (), {"tps": 108.0})

    assert _methods(Found())[1] == "ngram loses to decoding without drafts (110.0 tok/s)."
    Found.methods = {"mtp": 200.0, "ngram": 150.0}
    assert len(_methods(Found())) == 1


def test_a_build_is_told_from_the_machines_drift(with_knobs):
    folder = with_knobs("  max_num_batched_tokens: {choices: [256, 512, 1024], affects: speed}\n")
    _, store = searched(folder, "--sampler", "random", trials=24)  # with a control after every three prompts
    timed = [m.figures["slower"] for m in store.measurements("speed", "drift") if "slower" in m.figures]
    built = [m.setting for m in store.measurements("speed", "drift") if "slower" in m.figures]
    before = [m.figures["drift"] for m in store.measurements("speed", "control") if m.figures]
    assert len(timed) == 2 and max(abs(math.log(d)) for d in before) > 0.05  # the machine moved by then
    luck = [
        random.Random(_hash("build", sorted(build.items()))).uniform(-BUILD_SPREAD, BUILD_SPREAD)
        for build in (read_study(folder).build_of(setting) for setting in [store.outcome(REFERENCE).setting, *built])
    ]
    for slower, of_build in zip(timed, luck[1:], strict=True):
        assert math.log(slower) == pytest.approx(of_build - luck[0], abs=0.02)


def test_what_an_engine_was_built_with_is_read_from_what_acts():
    @dataclasses.dataclass
    class Part:
        block_size: int = 32
        cache_dtype: str = "fp8"
        mode: dict = dataclasses.field(default_factory=lambda: {"level": 3})

    @dataclasses.dataclass
    class Config:
        part: Part = dataclasses.field(default_factory=Part)

    group = SimpleNamespace(backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"))
    runner = SimpleNamespace(attn_groups=[[group]], speculative_config=SimpleNamespace(method="gemma4_mtp"))
    asked = {
        **{"block_size": 16, "kv_cache_dtype": "fp8", "mode.level": 3, "unknown": 1, "model": "m"},
        **{"attention_backend": "TRITON_ATTN", METHOD: "mtp", "env.NO_SUCH": "1"},
    }
    found = built_values(Config(), runner, asked)
    assert found == {
        **{"block_size": 32, "kv_cache_dtype": "fp8", "mode.level": 3},
        **{"attention_backend": "CPU_ATTN", METHOD: "mtp", "env.NO_SUCH": ""},
    }
    runner.speculative_config = None
    assert built_values(Config(), runner, {METHOD: "ngram"}) == {METHOD: "none"}


def test_the_doctor_says_how_many_engines_will_start(with_knobs):
    spec = read_study(with_knobs("  block_size: {choices: [16, 32, 64]}\n"))
    enough, few = (_engines(spec, trials) for trials in (30, 16))
    assert enough.verdict == "good" and enough.says.startswith("3 are started, 10 trials each, of the 3")
    assert few.verdict == "doubtful" and few.says.startswith("2 are started, 8 trials each, of the 3")
