"""Confirming finalists on a made-up server (test_vllm.py confirms on a real one)."""

import json
import random
import shutil
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from conftest import write_lines
from test_verify import EFFECTIVE

from search import confirm as confirming
from search.agreement import TOP, pack
from search.data import content_hash
from search.folder import REFERENCE as REFERENCE_FILE
from search.folder import TASKS, read_manifest, read_reference
from search.gate import RecordScore
from search.gates import AgreementSpec, TaskSpec
from search.identity import Plain
from search.manifest import build_manifest, write_manifest
from search.served import fall
from search.spec import read_study
from search.store import REFERENCE, Environment, Measurement, Outcome, Store, open_engine, setting_key


class MadeUpLaboratory:
    """Plain decoding as the made-up server does it."""

    def __init__(self):
        self.plain = self
        self.card = "card 0"
        self.ended = 0

    def tokens(self, setting, prompts, count):
        assert setting["num_speculative_tokens"] == 0
        return {p.id: Plain([(sum(p.token_ids) + 7 * i) % 4096 for i in range(count)], [1.0] * count) for p in prompts}

    def scores(self, setting, records):
        return {r.id: RecordScore(float(len(r.target)), len(r.target)) for r in records}

    def insist(self, what, attempt):
        return attempt()

    def end_worker(self):
        self.ended += 1


class Notes(list):
    note = list.append

    def stage(self, *_): ...


@pytest.fixture
def confirm(study_folder, tmp_path, monkeypatch):
    """Confirm two measured trials, with a server that is as `fake` says."""
    (study_folder / "target").mkdir()
    (study_folder / "target" / "config.json").write_text("{}")
    file = study_folder / "study.yaml"
    file.write_text(file.read_text().replace("model: example/model", "model: ./target"))
    spec = read_study(study_folder)
    store = Store(open_engine(f"sqlite:///{tmp_path}/s.db"), "s")
    hashes = {"model_hash": "aa", "drafter_hash": "bb", "build_hash": "cc"}
    environment = store.add_environment(
        Environment(study="s", simulated=False, native={}, facts={}, start_s=1.0, **hashes)
    )
    common = {"study": "s", "wall_s": 1.0, "state": "COMPLETE", "ceiling": 2.8, "ppl": 2.7183, "simulated": False}
    native = {"sliding_window": 512, "centroid_top_k": 32, "num_speculative_tokens": 0}
    store.finish(Outcome(trial=REFERENCE, setting=native, setting_key="r", tps=100.0, **common))
    for trial, top_k in enumerate((16, 32)):
        setting = {**EFFECTIVE, "centroid_top_k": top_k}
        speed = Measurement(
            study="s",
            trial=trial,
            environment_id=environment,
            stage="speed",
            status="done",
            setting=setting,
            effective=setting,
            figures={"acceptance_rate": [0.7], "output_hash": "00ff"},
            wall_s=1.0,
        )
        tps = {"tps": 500.0 - trial, "tps_low": 490.0, "tps_high": 510.0}
        store.finish(Outcome(trial=trial, setting=setting, setting_key=setting_key(setting), **tps, **common), [speed])

    def run(card="card 0", spec=spec, **fake):
        def write(manifest, spec, out):
            out.mkdir(parents=True)
            shutil.copy(Path(__file__).parent / "fake_serve.py", out / "serve.py")
            effective = {**EFFECTIVE, "centroid_top_k": int(manifest["env"]["CENTROID_TOP_K"])}
            said = {"drafts": 4, "first_token_s": 0.005, "decode_s": 0.01, "logprob": -1.0}
            manifest["env"]["FAKE"] = json.dumps({"effective": effective, **said, **fake})
            (out / "manifest.json").write_text(json.dumps(manifest))

        monkeypatch.setattr(confirming, "write_manifest", write)
        laboratory, notes = MadeUpLaboratory(), Notes()
        laboratory.card = card
        confirming.confirm(spec, store, laboratory, notes, 2, tmp_path / "logs")
        return store, notes, laboratory

    run.spec, run.store = spec, store
    return run


@pytest.fixture
def confirm_gated(confirm, study_folder):
    """The same of a study with gates beside perplexity, whose reference was measured."""
    write_lines(study_folder / "tasks.jsonl", [{"id": i, "prompt": f"say w{i}", "expected": f"w{i}"} for i in range(4)])
    asked = TaskSpec(study_folder / "tasks.jsonl", 8, exact=0.7)
    gate = replace(confirm.spec.gate, agreement=AgreementSpec(top1=0.9, kl=0.05), tasks=asked)
    spec, store = replace(confirm.spec, gate=gate), confirm.store
    likely = {4000 + i: -1.5 - i for i in range(TOP)}
    scores = {
        r.id: RecordScore(1.0, len(r.target), len(r.target), 0.0, pack([{**likely, t: -1.0} for t in r.target]))
        for r in spec.records()
    }
    store.remember_scores("key", scores)
    common = {"study": "s", "environment_id": 1, "setting": {}, "effective": {}, "wall_s": 1.0}
    store.add_all([Measurement(trial=REFERENCE, stage="gate", status="done", figures={"scores": "key"}, **common)])
    limits = {"ppl": 2.8, "top1": 0.9, "kl": 0.05, "exact": 0.7}
    with store._session() as session, session.begin():
        for trial in (REFERENCE, 0, 1):
            found = {name: {"outcome": "under", "figure": 1.0, "limit": x, "excess": 0} for name, x in limits.items()}
            session.get(Outcome, ("s", trial)).gates = found
    return partial(confirm, spec=spec), spec, store


def test_a_finalists_gates_are_measured_served_and_stand_in_its_manifest(confirm_gated):
    run, spec, store = confirm_gated
    run(wrong_answers=["w3"])
    winner = store.winner()
    assert winner.figures["gates"] == {"top1": 1.0, "kl": 0.0, "exact": 0.75}
    evidence = build_manifest(spec, store, store.outcome(winner.trial))["evidence"]
    told = {"figure": 0.75, "limit": 0.7, "reference": 1.0, "max_tokens": 8, "stop": []}
    assert evidence["gates"]["exact"] == told and set(evidence["gates"]) == {"top1", "kl", "exact"}
    assert evidence["hashes"]["tasks"] == content_hash(spec.gate.tasks.file)


@pytest.mark.parametrize(
    ("fake", "says"),
    [
        ({"wrong_answers": ["w2", "w3"]}, "served, gate exact: 0.5000 of the tasks answered as expected"),
        ({"likeliest": -0.95}, "served, gate top1: 0.0"),
    ],
)
def test_a_finalist_that_another_gate_refuses_served_does_not_win(confirm_gated, fake, says):
    run, _, store = confirm_gated
    run(**fake)
    assert store.winner() is None
    assert all(says in c.reason for c in store.confirmations())


def test_the_exported_folder_holds_the_tasks_and_the_reference(confirm_gated, tmp_path):
    _, spec, store = confirm_gated
    manifest = build_manifest(spec, store, store.outcome(0))
    write_manifest(manifest, spec, tmp_path / "out", store.reference_distributions())
    hashes = read_manifest(tmp_path / "out")["evidence"]["hashes"]
    assert content_hash(tmp_path / "out" / TASKS) == hashes["tasks"]
    assert content_hash(tmp_path / "out" / REFERENCE_FILE) == hashes["reference"]
    assert read_reference(tmp_path / "out") == store.reference_distributions() != {}


def test_the_leader_wins_after_two_processes_and_nothing_is_measured_twice(confirm):
    store, notes, laboratory = confirm()
    winner, found = store.winner(), store.confirmations()
    assert [(c.eligible, c.reason) for c in found] == [(True, None)] * 2
    assert len(winner.figures["processes"]) == 2 and winner.figures["same_tokens_again"] == 1.0
    assert winner.figures["identity"]["rate"] == 1.0
    assert winner.claimed <= winner.mean and winner.low < winner.mean < winner.high
    assert laboratory.ended >= 1 and any("Confirming 2 finalists" in note for note in notes)
    store, notes, laboratory = confirm()
    assert list(notes) == [] and laboratory.ended == 0


@pytest.mark.parametrize(
    ("held_out", "spread", "machine"), [(2, 0.1, 0.0), (24, 0.1, 0.0), (24, 0.1, 0.05), (2, 0.0, 0.1)]
)
def test_held_out_prompts_of_the_same_kind_are_not_said_to_be_slower(held_out, spread, machine):
    draw = random.Random(0)

    def timed(count, passes, slower=1.0):
        alone = {str(i): slower * draw.gauss(1.0, spread) for i in range(count)}
        paces = [draw.gauss(1.0, machine) for _ in range(passes)]
        return [{prompt: seconds * pace for prompt, seconds in alone.items()} for pace in paces]

    said = sum(fall(*timed(24, 1), timed(held_out, 3))[1] > 0 for _ in range(2000)) / 2000
    assert 0.015 < said < 0.035  # one end of an interval of 95 %
    found, least = fall(*timed(24, 1), timed(held_out, 3, 3.0))
    assert found == pytest.approx(2 / 3, abs=0.1) and 0.05 < least < found


@pytest.mark.parametrize(
    ("fake", "says"),
    [
        ({"drafts": 1}, "with 1 drafts a step"),
        ({"logprob": -1.05}, "over the ceiling of 2.8000"),
        ({"wrong_token": True}, "leave plain greedy decoding"),
        ({"dies": "out of memory"}, "ended before it was ready: out of memory"),
    ],
)
def test_a_finalist_that_is_not_borne_out_does_not_win(confirm, fake, says):
    store, _, _ = confirm(**fake)
    assert store.winner() is None
    assert all(says in c.reason for c in store.confirmations())


def test_a_finalist_whose_server_failed_is_tried_again(confirm):
    confirm(dies="out of memory")
    store, _, _ = confirm()
    assert store.winner() is not None


def test_all_finalists_are_confirmed_on_one_card(confirm):
    store, _, _ = confirm()
    loser = next(c for c in store.confirmations() if c.trial != store.winner().trial)
    loser.figures = {}  # its server failed
    store.add_confirmation(loser)
    store, notes, _ = confirm(card="card 1")
    assert any("Confirming 2 finalists" in note for note in notes)
    assert {c.figures["card"] for c in store.confirmations()} == {"card 1"}


def test_a_leader_is_served_again_on_the_card_that_it_was_confirmed_on_or_all_are_confirmed_anew(confirm, monkeypatch):
    with monkeypatch.context() as interrupted:
        interrupted.setattr(confirming, "PROCESSES", 1)
        store, _, _ = confirm()
    assert len(store.winner().figures["processes"]) == 1
    store, notes, _ = confirm(card="card 1")
    assert any("Confirming 2 finalists" in note for note in notes)
    assert {c.figures["card"] for c in store.confirmations()} == {"card 1"}
    assert len(store.winner().figures["processes"]) == 2


def test_waves_are_served_at_once_and_their_tokens_counted_together(confirm, study_folder):
    rows = [json.loads(line) for line in (study_folder / "prompts.jsonl").read_text().splitlines()]
    more = [{"id": f"h{i}", "split": "held-out", "prompt_token_ids": [i, 7, 9]} for i in range(3)]
    write_lines(study_folder / "prompts.jsonl", rows + more)
    spec = replace(confirm.spec, workload=replace(confirm.spec.workload, concurrency=2))
    store, _, _ = confirm(spec=spec, decode_s=0.1)
    winner = store.winner()
    passes = [seconds for process in winner.figures["processes"] for seconds in process["passes"]]
    assert set(passes[0]) == {wave.id for wave in spec.held_out_waves()} and len(passes[0]) == 2
    assert set(winner.figures["tokens"]) == {p.id for w in spec.waves() + spec.held_out_waves() for p in w.prompts}
    took = [seconds for one in passes for seconds in one.values()]
    assert 0.1 < min(took) < 0.19  # one after the other two prompts take 0.2 s
    assert winner.mean == pytest.approx(2 * 64 / statistics.fmean(took), rel=0.3)
    assert build_manifest(spec, store, store.outcome(winner.trial))["evidence"]["concurrency"] == 2
    assert "concurrency" not in build_manifest(confirm.spec, store, store.outcome(winner.trial))["evidence"]
