"""What verify holds and what it refuses, on a made-up server (test_vllm.py verifies a real one)."""

import json
import math
import shutil
import socket
import time
from pathlib import Path

import pytest
from conftest import ROOT, write_lines

from search import verify
from search.agreement import TOP, pack
from search.data import content_hash, read_records
from search.endpoint import Endpoint, EndpointError, served_environment
from search.folder import manifest_hash, reference_lines
from search.modelfiles import file_hash
from search.spec import LimitSpec
from tests.evaluator import evaluate

EFFECTIVE = {"sliding_window": 128, "centroid_top_k": 16, "num_speculative_tokens": 4}
FIRST_TOKEN_S, DECODE_S, TOKENS = 0.02, 0.04, 32  # long enough that a busy machine adds little


@pytest.fixture
def exported(tmp_path, study_folder):
    """An exported folder as search.export would write it, whose server is made up."""
    folder = tmp_path / "exported"
    (folder / "evidence").mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "fake_serve.py", folder / "serve.py")
    for name in ("prompts.jsonl", "records.jsonl"):
        shutil.copy(study_folder / name, folder / "evidence" / name)
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    fake = {"effective": EFFECTIVE, "drafts": 4, "first_token_s": FIRST_TOKEN_S, "decode_s": DECODE_S, "logprob": -1.0}
    manifest = {
        "model_id": str(tmp_path / "target"),
        "served_model_name": "made/up",
        "port": 8000,
        "confirmed": True,
        "env": {"FAKE": json.dumps(fake), "SPECULATIVE_CONFIG": json.dumps({"model": str(tmp_path / "drafter")})},
        "evidence": {
            "tps": {"claimed": 0.7 * TOKENS / (FIRST_TOKEN_S + DECODE_S)},
            "ppl": math.e,
            "ceiling": 2.8,
            "machine_s": FIRST_TOKEN_S + 0.0015,
            "pace_elasticity": 1.0,
            "output_tokens": TOKENS,
            "effective": EFFECTIVE,
            "hashes": {
                "model": file_hash(tmp_path / "target"),
                "drafter": file_hash(tmp_path / "drafter"),
                "prompts": content_hash(folder / "evidence" / "prompts.jsonl"),
                "records": content_hash(folder / "evidence" / "records.jsonl"),
            },
        },
    }
    return write(folder, manifest)


def write(folder, manifest):
    """The manifest with a hash that is right: whoever forges a claim can compute it too."""
    manifest["evidence"]["hashes"]["manifest"] = manifest_hash(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def forge(folder, **fake):
    """Another server behind the same claims."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["env"]["FAKE"] = json.dumps({**json.loads(manifest["env"]["FAKE"]), **fake})
    return write(folder, manifest)


def verified(folder, capsys, *arguments):
    code = verify.main([str(folder), "--json", *arguments])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code == 0) == document["holds"] == (not document["reasons"])
    assert code in (0, 3)
    return document


def test_what_is_as_it_claims_holds(exported, capsys):
    document = verified(exported, capsys)
    assert document["reasons"] == []
    assert {check["what"] for check in document["checks"]} >= {
        "tokens a second",
        "perplexity",
        "tokens are plain greedy ones",
        "scored path is served path",
    }


@pytest.mark.parametrize(
    ("forged", "says"),
    [
        ({"effective": {**EFFECTIVE, "sliding_window": 64}}, "it runs sliding_window=64"),
        ({"decode_s": 2 * DECODE_S}, "less than the"),
        ({"drafts": 1}, "It drafts 1 tokens a step, not 4"),
        ({"logprob": -1.05}, "over the ceiling of 2.8000"),
        ({"logprob": -1.01}, "the evidence says 2.7183 on the same records"),
        ({"logprob": -1.03}, "nats a token off what it said of them"),
        ({"wrong_token": True}, "no near tie explains it"),
        ({"first_token_s": 3 * FIRST_TOKEN_S}, "it cannot be checked here"),
        ({"cached": 64}, "64 tokens of the timed prompts came from the server's prefix cache"),
        ({"dies": "The drafter is not the one that was measured."}, "ended before it was ready: The drafter is not"),
    ],
)
def test_a_server_that_does_otherwise_is_refused_with_the_reason(exported, capsys, forged, says):
    document = verified(forge(exported, **forged), capsys)
    assert any(says in reason for reason in document["reasons"]), document["reasons"]


def test_an_edited_claim_a_changed_window_and_another_drafter_are_refused_before_anything_is_served(
    exported, capsys, tmp_path
):
    file = exported / "manifest.json"
    text = file.read_text()
    manifest = json.loads(text)
    manifest["evidence"]["tps"]["claimed"] *= 1.1
    file.write_text(json.dumps(manifest))
    assert "manifest.json is not what was measured" in verified(exported, capsys)["reasons"][0]
    file.write_text(text.replace('\\"sliding_window\\": 128', '\\"sliding_window\\": 64'))
    assert "manifest.json is not what was measured" in verified(exported, capsys)["reasons"][0]
    file.write_text(text)
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"noise")
    assert f"the drafter {tmp_path / 'drafter'} is not what was measured" in verified(exported, capsys)["reasons"][0]
    assert not (exported / "logs").exists()


def test_what_is_not_confirmed_claims_nothing(exported, capsys):
    manifest = json.loads((exported / "manifest.json").read_text())
    document = verified(write(exported, manifest | {"confirmed": None}), capsys)
    assert document["reasons"] == ["The manifest is not confirmed: it claims nothing."]


def test_private_prompts_and_records_are_taken(exported, capsys, study_folder):
    document = verified(
        exported,
        capsys,
        "--prompts",
        str(study_folder / "prompts.jsonl"),
        "--records",
        str(study_folder / "records.jsonl"),
    )
    assert document["holds"]
    assert "tokens a second (other prompts)" in {check["what"] for check in document["checks"]}


def test_private_prompts_may_be_text_which_the_server_makes_into_tokens(exported, tmp_path, capsys):
    rows = [{"prompt": f"text {i} "} for i in range(3)]
    rows += [{"messages": [{"role": "user", "content": f"message {i} "}]} for i in range(3)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verified(exported, capsys, "--prompts", str(tmp_path / "log.jsonl"))["holds"]


@pytest.fixture
def with_gates(exported):
    """The same with gates beside perplexity: four tasks, of which one is answered wrongly, and agreement in full."""
    evidence = exported / "evidence"
    write_lines(evidence / "tasks.jsonl", [{"id": i, "prompt": f"say w{i}", "expected": f"w{i}"} for i in range(4)])
    likely = {4000 + i: -1.5 - i for i in range(TOP)}
    packed = {
        r.id: pack([{**likely, token: -1.0} for token in r.target]) for r in read_records(evidence / "records.jsonl")
    }
    (evidence / "reference.jsonl").write_bytes(reference_lines(packed))
    manifest = json.loads((exported / "manifest.json").read_text())
    fake = {**json.loads(manifest["env"]["FAKE"]), "wrong_answers": ["w3"]}
    manifest["env"]["FAKE"] = json.dumps(fake)
    manifest["evidence"]["gates"] = {
        "top1": {"figure": 1.0, "limit": 0.9, "reference": 1.0},
        "kl": {"figure": 0.0, "limit": 0.05, "reference": 0.0},
        "exact": {"figure": 0.75, "limit": 0.5, "reference": 1.0, "max_tokens": 8, "stop": []},
    }
    for name in ("tasks", "reference"):
        manifest["evidence"]["hashes"][name] = content_hash(evidence / f"{name}.jsonl")
    return write(exported, manifest)


def test_every_gate_is_measured_again_and_held_against_limit_and_claim(with_gates, capsys, study_folder):
    document = verified(with_gates, capsys)
    assert document["reasons"] == []
    measured = {check["what"]: check["measured"] for check in document["checks"]}
    assert (measured["gate top1"], measured["gate kl"], measured["gate exact"]) == ("1.0000", "0.0000", "0.7500")
    other = verified(with_gates, capsys, "--records", str(study_folder / "records.jsonl"))
    assert "gate exact" in {check["what"] for check in other["checks"]}
    assert "gate top1" not in {check["what"] for check in other["checks"]}  # nothing is known of the reference there


@pytest.mark.parametrize(
    ("forged", "says"),
    [
        ({"wrong_answers": ["w1", "w2", "w3"]}, "gate exact: 0.2500 of the tasks answered as expected"),
        ({"wrong_answers": ["w1", "w2", "w3"]}, "figure of gate exact is 0.2500; the evidence says 0.7500"),
        ({"likeliest": -0.95}, "gate top1: 0.0"),
        ({"likeliest": -0.95}, "gate kl: 0."),
    ],
)
def test_a_server_that_agrees_less_or_answers_otherwise_is_refused(with_gates, capsys, forged, says):
    document = verified(forge(with_gates, **forged), capsys)
    assert any(says in reason for reason in document["reasons"]), document["reasons"]


def test_better_answers_than_claimed_are_another_model(with_gates, capsys):
    manifest = json.loads((with_gates / "manifest.json").read_text())
    manifest["evidence"]["gates"]["exact"] |= {"figure": 0.4, "limit": 0.1}
    reasons = verified(write(with_gates, manifest), capsys)["reasons"]
    assert reasons == ["Its figure of gate exact is 0.7500; the evidence says 0.4000."]


def test_changed_tasks_and_another_reference_are_refused_before_anything_is_served(with_gates, capsys):
    for name in ("tasks", "reference"):
        file = with_gates / "evidence" / f"{name}.jsonl"
        kept = file.read_bytes()
        file.write_bytes(kept.replace(b"w2", b"w1") if name == "tasks" else kept[: len(kept) // 2])
        assert f"the file evidence/{name}.jsonl is not what was measured" in verified(with_gates, capsys)["reasons"][0]
        file.unlink()
        assert f"the file evidence/{name}.jsonl is not what was measured" in verified(with_gates, capsys)["reasons"][0]
        file.write_bytes(kept)
    assert not (with_gates / "logs").exists()


def test_a_folder_without_manifest_is_a_bad_argument(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        verify.main([str(tmp_path)])
    assert stopped.value.code == 2
    assert "holds no manifest.json" in capsys.readouterr().err


def test_an_ended_endpoint_leaves_no_process(exported, tmp_path):
    with Endpoint(exported, tmp_path / "log", LimitSpec()) as endpoint:
        group = endpoint._group
        assert endpoint.model == "made/up" and len(group.members()) == 2  # the leash and the server
    assert group.members() == set()


def test_a_foreign_server_at_the_port_is_not_measured(exported, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr("search.endpoint._free_port", lambda: other.getsockname()[1])
        with pytest.raises(EndpointError, match="Another program listens at port"):
            Endpoint(forge(exported, listens=False), tmp_path / "log", LimitSpec()).__enter__()


def test_a_server_that_never_gets_warm_is_given_up(exported, tmp_path):
    file = exported / "serve.py"
    file.write_text("import time; print('loading', flush=True); time.sleep(60)")
    for limits, says in ((LimitSpec(stall_s=1), "silent for 1 s"), (LimitSpec(build_s=1), "not ready after 1 s")):
        with pytest.raises(EndpointError, match=f"{says}.*loading"):
            Endpoint(exported, tmp_path / "log", limits).__enter__()


def test_a_server_that_does_not_answer_in_time_is_given_up(exported, tmp_path):
    slow = forge(exported, first_token_s=30)
    with (
        Endpoint(slow, tmp_path / "log", LimitSpec(stall_s=1)) as endpoint,
        pytest.raises(EndpointError, match="timed out"),
    ):
        endpoint.complete([1, 2, 3], 8)
    with Endpoint(slow, tmp_path / "log", LimitSpec(confirm_s=1)) as endpoint:
        time.sleep(1.1)
        with pytest.raises(EndpointError, match="took longer than 1 s"):
            endpoint.effective()


def test_a_server_that_refuses_is_quoted(exported, tmp_path):
    refusing = forge(exported, refuses={"/effective": "FA_SLIDING cannot act"})
    with (
        Endpoint(refusing, tmp_path / "log", LimitSpec()) as endpoint,
        pytest.raises(EndpointError, match="did not answer /effective as it should: 500, .*FA_SLIDING cannot act"),
    ):
        endpoint.effective()


@pytest.mark.parametrize(
    ("where", "said", "found"),
    [("elsewhere", "", None), ("elsewhere", "libs:/opt/libs", "{here}/libs:/opt/libs"), ("checkout", "", "{here}")],
)
def test_a_server_finds_the_packages_of_who_started_it(tmp_path, monkeypatch, where, said, found):
    here = tmp_path if where == "elsewhere" else ROOT
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", said)
    monkeypatch.setenv("SOME_SECRET", "s")
    environment = served_environment()
    assert environment.get("PYTHONPATH") == (found and found.format(here=here))
    assert "SOME_SECRET" not in environment


def test_an_answer_with_too_few_tokens_is_no_completion(exported, tmp_path):
    with Endpoint(exported, tmp_path / "log", LimitSpec()) as endpoint:
        assert len(endpoint.complete([1, 2, 3], 8).token_ids) == 8
        with pytest.raises(EndpointError, match="log-probability|scored"):
            endpoint.score([], [1, 2])  # the first token has none


def test_the_challenges_evaluator_can_run_an_exported_folder(exported, study_folder, tmp_path):
    """What a stranger does with it, from its manifest and the OpenAI protocol alone, in both forms of prompts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    manifest = json.loads((exported / "manifest.json").read_text())
    write(exported, manifest | {"port": port, "serve": f"python serve.py --port {port}"})
    chats = tmp_path / "eval_prompts_sharegpt.json"
    chats.write_text(json.dumps([{"conversations": [{"from": "human", "value": f"question {i}"}]} for i in range(3)]))
    tokens = tmp_path / "prompts.jsonl"
    write_lines(tokens, [{"id": i, "prompt_token_ids": [i + 1, 2, 3]} for i in range(3)])
    for prompts in (chats, tokens):
        out = tmp_path / prompts.stem
        summary = evaluate(exported, prompts, study_folder / "records.jsonl", out, TOKENS)
        assert (summary["completed"], summary["num_prompts"], summary["output_len"]) == (3, 3, TOKENS)
        assert summary["decode_num_completion_tokens"] == 3 * TOKENS
        assert summary["ppl"] == pytest.approx(math.e) and summary["ppl_num_tokens"] == 16 * 16
        assert summary["tps"] == pytest.approx(3 * TOKENS / summary["duration_s"])
        assert json.loads((out / "summary.json").read_text()) == summary


def test_a_claim_of_waves_is_held_against_waves(exported, capsys, tmp_path):
    manifest = json.loads((exported / "manifest.json").read_text())
    manifest["evidence"]["concurrency"] = 2
    manifest["evidence"]["tps"]["claimed"] *= 1.8  # what prompts that are asked for one by one do not reach
    write(exported, manifest)
    many = tmp_path / "many.jsonl"
    write_lines(many, [{"id": i, "prompt_token_ids": [i + 1, 2, 3]} for i in range(4)])
    assert verified(exported, capsys, "--prompts", str(many))["reasons"] == []
    write_lines(many, [{"id": i, "prompt_token_ids": [i + 1, 2, 3]} for i in range(3)])
    with pytest.raises(SystemExit):
        verify.main([str(exported), "--prompts", str(many)])
    assert "holds 3 prompts: no speed can be told from fewer than two waves of 2" in capsys.readouterr().err
