"""Which study is taken, and how a command is repeated."""

import shutil

import pytest
from conftest import ROOT

from search import cli
from search.errors import UsageError
from search.spec import read_study

GPU = {"name": "NVIDIA A10G"}


@pytest.fixture
def studies(tmp_path, monkeypatch):
    """The bundled studies' files, without models."""
    for name in ("miniature", "gemma-4-e4b-a10g"):
        (tmp_path / "studies" / name).mkdir(parents=True)
        shutil.copy(ROOT / "studies" / name / "study.yaml", tmp_path / "studies" / name)
    monkeypatch.setattr(cli, "STUDY_FOLDERS", (tmp_path / "studies",))
    return tmp_path / "studies"


@pytest.mark.parametrize(
    ("gpu", "texts", "taken", "why"),
    [
        (None, True, "miniature", "no NVIDIA GPU is seen"),
        (GPU, False, "miniature", "gemma-4-e4b-a10g has no prompts and records yet"),
        (GPU, True, "gemma-4-e4b-a10g", "there is a GPU, NVIDIA A10G"),
    ],
)
def test_without_a_name_the_gpus_study_is_taken_where_it_can_run(studies, monkeypatch, gpu, texts, taken, why):
    monkeypatch.setattr("search.engine.gpu.first_gpu", lambda: gpu)
    if texts:
        for name in ("prompts.jsonl", "records.jsonl"):
            (studies / "gemma-4-e4b-a10g" / name).touch()
    path, said = cli.find_study(None)
    assert path.parent.name == taken and why in said


def test_a_study_is_found_by_name_and_one_that_is_not_there_is_said_with_those_that_are(studies):
    assert cli.find_study("gemma-4-e4b-a10g") == (studies / "gemma-4-e4b-a10g" / "study.yaml", "as asked")
    with pytest.raises(UsageError, match="bundled are gemma-4-e4b-a10g, miniature"):
        cli.find_study("nothing")


def test_the_challenges_study_has_its_arguments_and_its_ceiling(studies):
    spec = read_study(studies / "gemma-4-e4b-a10g")
    assert spec.engine.args["max_num_batched_tokens"] == 512 and spec.gate.ppl == 2.42
    assert {knob.name: knob.largest for knob in spec.knobs} == {
        "sliding_window": 512,
        "centroid_top_k": 128,
        "num_speculative_tokens": 10,
    }


def test_a_command_is_repeated_for_the_same_study_without_its_password():
    assert cli.study_arguments(None, cli.DEFAULT_STORAGE) == ""
    shown = cli.study_arguments("my study", "postgresql://me:secret@host/db")
    assert shown == " --study 'my study' --storage 'postgresql+psycopg://me:***@host/db'"
