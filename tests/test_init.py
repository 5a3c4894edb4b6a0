"""New studies: what is written for a model, and that it runs."""

import sys

import pytest
import yaml
from conftest import MINIATURE, write_lines

from kernels.random_checkpoint import DRAFTER, TARGET
from search import doctor, init, run
from search.errors import UsageError
from search.newstudy import knob_ranges, prefill_chunk

MODELS = {name: str(MINIATURE / folder) for name, folder in (("--model", "target"), ("--drafter", "drafter"))}
TEXTS = {"--prompts": str(MINIATURE / "prompts.jsonl"), "--records": str(MINIATURE / "records.jsonl")}


def words(flags):
    return [word for pair in flags.items() for word in pair]


def test_a_written_study_is_one_that_the_doctor_passes_and_the_search_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert init.main(["my", *words(MODELS | TEXTS)]) == 0
    assert "sliding_window: low 64, high 512, step 16" in capsys.readouterr().out
    assert doctor.main(["--study", "my"]) == 0
    assert run.main(["--study", "my", "--engine", "simulated", "--trials", "3", "--confirm", "0"]) == 0


def test_drafts_may_be_looked_up_with_a_drafter_and_without(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, flags in (("alone", {"--model": MODELS["--model"]}), ("beside", MODELS)):
        assert init.main([name, *words(flags | TEXTS), "--ngram"]) == 0
        assert run.main(["--study", name, "--engine", "simulated", "--trials", "3", "--confirm", "0"]) == 0
    assert "method: choices ['mtp', 'ngram', 'none']" in capsys.readouterr().out


def test_its_ranges_are_those_of_the_model():
    found = knob_ranges(TARGET, DRAFTER)
    assert found["sliding_window"] == {"low": 64, "high": 512, "step": 16}
    assert found["centroid_top_k"] == {"low": 8, "high": 128, "log": True}
    assert "centroid_top_k" not in knob_ranges(TARGET, DRAFTER | {"use_ordered_embeddings": False})
    assert list(knob_ranges(TARGET, None)) == ["sliding_window"]
    assert list(knob_ranges({"sliding_window": None}, DRAFTER)) == ["centroid_top_k", "num_speculative_tokens"]
    assert list(knob_ranges(TARGET, None, ngram=True)) == ["sliding_window", "num_speculative_tokens"]
    assert knob_ranges(TARGET, DRAFTER, ngram=True)["method"] == {"choices": ["mtp", "ngram", "none"]}
    with pytest.raises(UsageError, match="nothing to search"):
        knob_ranges({}, None)


def test_a_prefill_chunk_leaves_room_for_its_logits():
    assert prefill_chunk(262144, 4096, 24 << 30) == 512  # what the contest's entries set by hand for an A10G
    assert prefill_chunk(4096, 1024, 24 << 30) == 1024  # never more than the context
    assert prefill_chunk(262144, 4096, 1 << 30) == 16


def test_texts_that_do_not_fit_leave_nothing_behind(tmp_path, capsys):
    foreign = tmp_path / "records.jsonl"
    write_lines(foreign, [{"id": f"r{i}", "context_token_ids": [1], "target_token_ids": [262143]} for i in range(4)])
    with pytest.raises(SystemExit, match="2"):
        init.main([str(tmp_path / "my"), *words(MODELS | TEXTS | {"--records": str(foreign)})])
    assert "beyond the vocabulary" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_a_folder_that_is_in_use_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        init.main([str(tmp_path), *words(MODELS | TEXTS)])
    assert "not empty" in capsys.readouterr().err and (tmp_path / "notes.txt").read_text() == "mine"


def test_what_is_not_given_is_asked_for(tmp_path, monkeypatch):
    answers = {"Model": MODELS["--model"], "Its drafter": "", "Prompts": TEXTS["--prompts"]}
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: answers[question.partition(" (")[0]])
    assert init.main([str(tmp_path / "my"), "--records", TEXTS["--records"], "--ppl", "4.2"]) == 0
    study = yaml.safe_load((tmp_path / "my" / "study.yaml").read_text())
    assert "drafter" not in study["engine"] and list(study["knobs"]) == ["sliding_window"]
    assert study["gate"]["ceiling"] == {"ppl": 4.2}


def test_where_nobody_can_answer_the_flag_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        init.main([str(tmp_path / "my"), "--model", MODELS["--model"]])
    assert "--prompts is needed" in capsys.readouterr().err
