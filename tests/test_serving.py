"""The manifest and what is made of it, without starting a server (test_vllm.py starts one)."""

import asyncio
import json
import signal
import socket
import threading

import pytest

from search import export
from search.engine import readback
from search.errors import RefusedError
from search.folder import manifest_hash
from search.manifest import build_manifest, environment_keys, write_manifest
from search.serving import _check_port, _warm_up_or_end, derive_drafter, drafter_values, server_arguments
from search.spec import read_study
from search.store import REFERENCE, Environment, Measurement, Outcome, Store, open_engine

SETTING = {"sliding_window": 188, "centroid_top_k": 49, "num_speculative_tokens": 7}


@pytest.fixture
def model_folder(tmp_path):
    def make(name, config):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(b"weights")
        return folder

    return make


@pytest.fixture
def spec(edit_study, model_folder):
    target = model_folder("target", {"text_config": {"sliding_window": 512}})
    return read_study(edit_study("model: example/model", f"model: {target}"))


@pytest.fixture
def manifest(spec, store):
    return build_manifest(spec, store, store.outcome(17))


@pytest.fixture
def store(tmp_path):
    """A study with one measured trial, 17, that is not confirmed."""
    store = Store(open_engine(f"sqlite:///{tmp_path}/s.db"), "s")
    facts = {"vllm": "0.32.0", "transformers": "5.19.0", "torch": "2.13.0+cpu"}
    environment = store.add_environment(
        Environment(
            study="s",
            simulated=False,
            model_hash="aa",
            drafter_hash="bb",
            build_hash="cc",
            native={},
            facts=facts,
            start_s=1.0,
        )
    )
    figures = {"acceptance_rate": [0.7, float("nan")], "output_hash": "00ff"}
    speed = Measurement(
        study="s",
        trial=17,
        environment_id=environment,
        stage="speed",
        status="done",
        setting=SETTING,
        effective=SETTING,
        figures=figures,
        wall_s=1.0,
    )
    common = {"study": "s", "state": "COMPLETE", "setting_key": "k", "wall_s": 1.0, "simulated": False, "ceiling": 2.42}
    store.finish(Outcome(trial=REFERENCE, setting={}, tps=200.0, ppl=2.3, **common))
    measured = {"setting": SETTING, "tps": 510.5, "tps_low": 508.0, "tps_high": 513.0, "ppl": 2.393}
    store.finish(Outcome(trial=17, **measured, **common), [speed])
    return store


def test_keys_of_vllm_that_the_shell_had_set_are_carried_along_and_the_studys_own_win(edit_study, model_folder, store):
    target = model_folder("target", {"text_config": {"sliding_window": 512}})
    environment = store.environments()[0].id
    store.add_facts(environment, {"shell": {"VLLM_A": "0", "VLLM_B": "of the shell"}})
    edit_study("model: example/model", f"model: {target}")
    folder = edit_study("knobs:", "knobs:\n  env.VLLM_B: {choices: [of the study, other]}")
    outcome = store.outcome(17)
    outcome.setting = {**outcome.setting, "env.VLLM_B": "of the study"}
    env = build_manifest(read_study(folder), store, outcome)["env"]
    assert (env["VLLM_A"], env["VLLM_B"]) == ("0", "of the study")


def test_every_key_follows_from_the_setting_and_is_text(spec):
    keys = environment_keys(spec, SETTING)
    assert all(isinstance(value, str) for value in keys.values())
    assert (keys["SLIDING_WINDOW"], keys["CENTROID_TOP_K"], keys["MAX_MODEL_LEN"]) == ("188", "49", "1024")
    assert json.loads(keys["HF_OVERRIDES"]) == {"text_config": {"sliding_window": 188}}
    assert json.loads(keys["SPECULATIVE_CONFIG"]) == {
        "method": "mtp",
        "model": "example/drafter",
        "num_speculative_tokens": 7,
    }
    assert (keys["WARMUP_NUM_PROMPTS"], keys["WARMUP_MAX_TOKENS"], keys["WARMUP_SEED"]) == ("64", "1", "42")
    assert "FA_SLIDING" not in keys  # nothing honours it yet


def test_overrides_have_the_shape_of_the_models_config(spec, model_folder, edit_study):
    flat = model_folder("flat", {"sliding_window": 512})
    folder = edit_study(spec.engine.model, str(flat))
    keys = environment_keys(read_study(folder), SETTING)
    assert json.loads(keys["HF_OVERRIDES"]) == {"sliding_window": 188}


def test_a_port_in_use_is_said_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"Port {port} cannot be listened at .*: choose another with --port"):
            _check_port(port)
    _check_port(port)


def test_without_drafts_no_drafter_is_served(spec):
    keys = environment_keys(spec, {**SETTING, "num_speculative_tokens": 0})
    assert "SPECULATIVE_CONFIG" not in keys and "CENTROID_TOP_K" not in keys


def test_a_manifest_invents_nothing(manifest, spec, tmp_path):
    write_manifest(manifest, spec, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert written["confirmed"] is None
    evidence = written["evidence"]
    searched = {"mean": 510.5, "low": 508.0, "high": 513.0}
    assert evidence["tps"] == {"claimed": None, "mean": None, "low": None, "high": None, "searched": searched}
    assert evidence["held_out"] is evidence["identity"] is evidence["p_pass"] is None
    assert evidence["acceptance_rate"] == [0.7, None]
    assert evidence["ratio"] == pytest.approx(2.393 / 2.3)


def test_a_manifests_hash_changes_with_its_claim_and_with_nothing_else(manifest):
    again = json.loads(json.dumps({**manifest}).replace("NaN", "null"))
    assert manifest_hash(again) == manifest["evidence"]["hashes"]["manifest"]
    again["evidence"]["tps"]["claimed"] = 561.0
    assert manifest_hash(again) != manifest["evidence"]["hashes"]["manifest"]


def test_an_export_replaces_an_older_one_and_nothing_else(manifest, spec, tmp_path):
    out = tmp_path / "out"
    write_manifest(manifest, spec, out)
    (out / "drafter").mkdir()
    write_manifest({**manifest, "name": "second"}, spec, out)
    assert json.loads((out / "manifest.json").read_text())["name"] == "second"
    assert sorted(p.name for p in out.iterdir()) == ["evidence", "manifest.json", "serve.py"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious.txt").write_text("x")
    with pytest.raises(RefusedError, match="not an exported manifest"):
        write_manifest(manifest, spec, other)
    assert (other / "precious.txt").exists()


def test_an_export_writes_the_forms_that_are_asked_for(spec, store, edit_study, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = edit_study("name: synthetic", "name: s")
    store.define(read_study(folder).definition(), {})
    study = ["--study", str(folder), "--storage", f"sqlite:///{tmp_path}/s.db", "--trial", "17", "--unverified"]
    assert export.main([*study, "--as", "compose", "--as", "env"]) == 0
    found = {path.name for path in (tmp_path / "manifest").iterdir()}
    assert found == {"compose.yaml", "evidence", "manifest.env", "manifest.json", "serve.py"}
    assert "Also: manifest/compose.yaml" in capsys.readouterr().out
    before = (tmp_path / "manifest" / "manifest.json").read_text()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name: 1 / 0)
    with pytest.raises(SystemExit, match="1"):  # example/drafter cannot be had, and a plain vLLM needs its folder
        export.main([*study, "--as", "vllm"])
    assert "drafter" in capsys.readouterr().err
    assert (tmp_path / "manifest" / "manifest.json").read_text() == before


def test_the_derived_drafter_carries_window_and_top_k(manifest, model_folder, tmp_path):
    source = model_folder("drafter", {"centroid_intermediate_top_k": 32, "text_config": {"sliding_window": 512}})
    out = derive_drafter(source, tmp_path / "derived", drafter_values(manifest["env"]))
    config = json.loads((out / "config.json").read_text())
    assert config == {"centroid_intermediate_top_k": 49, "text_config": {"sliding_window": 188}}
    assert (out / "model.safetensors").resolve() == (source / "model.safetensors").resolve()
    assert json.loads((source / "config.json").read_text())["centroid_intermediate_top_k"] == 32
    assert derive_drafter(source, out, {"centroid_top_k": 8}) == out  # a second start makes it anew


def test_the_servers_arguments_are_the_manifests(manifest, tmp_path):
    arguments = server_arguments(manifest, tmp_path / "target", tmp_path / "drafter")

    def value(flag):
        return arguments[arguments.index(flag) + 1]

    assert value("--max-model-len") == "1024" and value("--max-num-seqs") == "1"
    assert "--no-enable-prefix-caching" in arguments
    assert json.loads(value("--hf-overrides")) == {"text_config": {"sliding_window": 188}}
    assert json.loads(value("--speculative-config"))["model"] == str(tmp_path / "drafter")


def test_nobody_but_the_warm_up_is_answered_before_it_is_done(monkeypatch):
    monkeypatch.setattr(readback, "warm", threading.Event())

    async def vllm(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def status(path, headers=()):
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "path": path, "headers": list(headers)}
        asyncio.run(readback.EffectiveKnobs(vllm)(scope, None, send))
        return sent[0]["status"]

    own = [(readback.WARM_UP_HEADER.encode(), readback.WARM_UP_PASS.encode())]
    guessed = [(readback.WARM_UP_HEADER.encode(), b"let me in")]
    assert [status(path) for path in ("/health", "/v1/models", "/effective")] == [503, 503, 503]
    assert status("/v1/completions", guessed) == 503
    assert status("/v1/completions", own) == 200
    readback.warm.set()
    assert status("/v1/models") == 200


def test_a_warm_up_that_fails_ends_the_server(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr("search.serving.os.kill", lambda pid, how: ended.append(how))
    monkeypatch.setattr("search.serving.READY_WAIT_S", 0)
    env = {"WARMUP_BRIDGE": "1", "WARMUP_NUM_PROMPTS": "1", "WARMUP_MAX_TOKENS": "1", "WARMUP_SEED": "0"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        _warm_up_or_end({"env": env, "served_model_name": "m"}, probe.getsockname()[1], 100, None)
    assert ended == [signal.SIGTERM] and "error: The warm-up failed" in capsys.readouterr().out
