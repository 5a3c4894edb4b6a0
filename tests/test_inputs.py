"""Files that a user hands over: what does not fit is said with the file, the line or record, and the reason."""

import json
import shutil

import pytest
from conftest import MINIATURE, write_lines

from search.data import read_prompts, read_records
from search.errors import UsageError
from search.folder import read_manifest
from search.inputs import check_inputs
from search.section import line_of
from search.sources import read_given_prompts, read_given_records, read_text
from search.spec import read_study


@pytest.fixture
def study(tmp_path):
    """A copy of the miniature's study with model folders that hold their configs alone."""
    folder = tmp_path / "study"
    folder.mkdir()
    for part in ("target", "drafter"):
        (folder / part).mkdir()
        shutil.copy(MINIATURE / part / "config.json", folder / part)
    for name in ("study.yaml", "prompts.jsonl", "records.jsonl"):
        shutil.copy(MINIATURE / name, folder)
    return folder


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name, value in changes.items():
        (config if name in config else config["text_config"])[name] = value
    file.write_text(json.dumps(config))


def edit_study(folder, old, new):
    file = folder / "study.yaml"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def refused(folder, says):
    with pytest.raises(UsageError, match=says):
        check_inputs(read_study(folder))


def test_the_bundled_study_fits(study):
    check_inputs(read_study(study))


def test_a_window_over_the_models_own_is_refused_at_its_line(study):
    edit_study(study, "high: 256, step: 16", "high: 528, step: 16")
    line = line_of(study / "study.yaml", "knobs.sliding_window.high")
    assert "sliding_window" in (study / "study.yaml").read_text().splitlines()[line - 1]
    refused(study, rf"study.yaml, line {line}: knobs.sliding_window.high: 528 is over the window of 512")


def test_centroids_must_divide_the_vocabulary_and_bound_top_k(study):
    edit_config(study / "drafter", num_centroids=100)
    refused(study, r"line \d+: engine.drafter: its 100 centroids do not divide its vocabulary of 4096")
    edit_config(study / "drafter", num_centroids=64)
    refused(study, "knobs.centroid_top_k.high: 128 is over the drafter's 64 centroids")
    edit_config(study / "drafter", num_centroids=128, use_ordered_embeddings=False)
    refused(study, "the drafter has no centroids")


def test_a_drafter_of_another_model_is_refused(study):
    edit_config(study / "drafter", backbone_hidden_size=2560)
    refused(study, "this drafter is another model's: its hidden size of its target is 2560, study/target has 192")
    edit_config(study / "drafter", backbone_hidden_size=192, vocab_size=262144)
    refused(study, "this drafter is another model's: its vocabulary is 262144")


def test_a_token_beyond_the_vocabulary_names_the_record(study):
    rows = [json.loads(line) for line in (study / "records.jsonl").read_text().splitlines()]
    rows[5]["target_token_ids"][3] = 4096
    write_lines(study / "records.jsonl", rows)
    refused(study, rf"records.jsonl, record {rows[5]['id']}: token 4096 is beyond the vocabulary of 4096")


def test_a_prompt_longer_than_the_context_is_named(study):
    rows = [json.loads(line) for line in (study / "prompts.jsonl").read_text().splitlines()]
    rows[2]["prompt_token_ids"] = [1] * 1000
    write_lines(study / "prompts.jsonl", rows)
    refused(study, rf"prompt {rows[2]['id']}: 1000 tokens and 64 to generate do not fit the context of 1024")


def test_a_config_that_is_none_is_refused_at_the_models_line(study):
    (study / "target" / "config.json").write_text("[1, 2")
    refused(study, "engine.model: .* holds no readable config.json")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("ratio: 1.05", "ratio: .nan", "gate.ceiling.ratio must be a number up to"),
        ("ratio: 1.05", "ratio: !!python/object:os.system {}", "gate.ceiling.ratio cannot be read"),
        ("high: 256", "high: 99999999999999999999", "knobs.sliding_window.high must be a number up to"),
        ("name: miniature", "name: ../../etc", "name must be letters"),
        ("name: miniature", "name: &a miniature\nother: *a", "aliases .* are not supported"),
        ("name: miniature", "name: miniature\nname: again", "name stands there twice"),
        ("max_model_len: 1024", "max_model_len: 2026-01-01", "engine.args.max_model_len must be a number, text"),
        ("prompts: prompts.jsonl", 'prompts: "a\\0b"', "workload.prompts holds characters that cannot be printed"),
        ("gate:", "limits: {gate_s: 0}\ngate:", "limits.gate_s must be at least 1"),
        ("gate:", "limits: {gates: 5}\ngate:", "limits.gates is not a key .* did you mean gate_s"),
    ],
)
def test_a_study_file_is_refused_with_its_line_and_key(study, old, new, says):
    edit_study(study, old, new)
    with pytest.raises(UsageError, match=rf"study.yaml, line \d+: {says}"):
        read_study(study)


def test_a_study_file_in_another_encoding_or_far_too_large_is_refused(study):
    (study / "study.yaml").write_bytes("name: größe".encode("latin-1"))
    with pytest.raises(UsageError, match="line 1: not UTF-8"):
        read_study(study)
    (study / "study.yaml").write_bytes(b"#" * (1 << 21))
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        read_study(study)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"id": 1, "prompt_token_ids": [1, NaN]}', "line 2: prompt_token_ids must be a list of token ids"),
        (b'{"id": {"a": 1}, "prompt_token_ids": [1]}', "line 2: id must be a number or a text"),
        (b'{"id": "a", "prompt_token_ids": [1]}', "line 2: id 'a' occurs twice"),
        (b'{"prompt_token_ids": [1]}', "line 2: 'id' is missing"),
        (b"[1, 2]", "line 2: not an object in braces"),
        (b'{"id": "\xff"}', "line 2: .*utf-8"),
        (b"[" * 100_000, "line 2: "),
        (b'{"id": "b", "split": ["x"], "prompt_token_ids": [1]}', "line 2: split is"),
    ],
)
def test_a_prompt_that_is_none_is_refused_with_its_line(tmp_path, line, says):
    (tmp_path / "p.jsonl").write_bytes(b'{"id": "a", "prompt_token_ids": [1]}\n' + line)
    with pytest.raises(UsageError, match=rf"p\.jsonl, {says}"):
        read_prompts(tmp_path / "p.jsonl")


def test_files_that_are_empty_or_folders_are_refused(tmp_path):
    (tmp_path / "empty").touch()
    for read in (read_prompts, read_records, read_given_prompts, read_given_records, read_text):
        with pytest.raises(UsageError, match="empty"):
            read(tmp_path / "empty")
        with pytest.raises(UsageError, match="cannot be read"):
            read(tmp_path)


MANIFEST = {
    "model_id": "m",
    "served_model_name": "m",
    "port": 8000,
    "env": {},
    "confirmed": True,
    "evidence": {
        "tps": {"claimed": 100.0},
        "ppl": 2.0,
        "ceiling": 2.1,
        "output_tokens": 64,
        "effective": {},
        "hashes": {},
        "machine_s": 0.01,
        "pace_elasticity": 1.5,
    },
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"port": "8000"}, r"Expected `int`, got `str` - at `\$.port`"),
        ({"env": {"A": 1}}, r"at `\$.env"),
        ({"env": {"HF_OVERRIDES": "[]"}}, "env.HF_OVERRIDES is no JSON object"),
        ({"env": {"WARMUP_SEED": "x"}}, "invalid literal"),
        ({"evidence": {**MANIFEST["evidence"], "tps": {"claimed": None}}}, "not what it claims"),
        ({"evidence": 5}, r"at `\$.evidence`"),
    ],
)
def test_a_manifest_that_is_none_is_refused_with_its_key(tmp_path, change, says):
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    assert read_manifest(tmp_path) == MANIFEST
    (tmp_path / "manifest.json").write_text(json.dumps({**MANIFEST, **change}))
    with pytest.raises(UsageError, match=says):
        read_manifest(tmp_path)


def test_a_folder_whose_files_lead_out_of_it_is_refused(tmp_path):
    folder = tmp_path / "exported"
    (folder / "evidence").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    (folder / "evidence" / "prompts.jsonl").symlink_to("/etc/hostname")
    with pytest.raises(UsageError, match="leads out of the folder"):
        read_manifest(folder)


def test_another_kind_of_drafter_is_refused(study):
    edit_config(study / "drafter", model_type="eagle")
    refused(study, "line 5: engine.drafter: a drafter of type eagle is not supported yet")


@pytest.mark.parametrize(
    ("tune", "held_out", "says"), [(2, 0, "holds 2 tune prompts: 3 are needed"), (3, 1, "one held-out")]
)
def test_too_few_prompts_to_tell_anything_from_are_refused(study, tune, held_out, says):
    splits = ["tune"] * tune + ["held-out"] * held_out
    rows = [{"id": i, "prompt_token_ids": [1, 2], "split": split} for i, split in enumerate(splits)]
    write_lines(study / "prompts.jsonl", rows)
    refused(study, says)


def test_a_context_length_in_words_is_vllms_business(study):
    edit_study(study, "max_model_len: 1024", "max_model_len: 4k")
    check_inputs(read_study(study))


def test_an_engine_that_decodes_fewer_prompts_at_once_than_are_asked_for_is_refused(study):
    edit_study(study, "output_tokens: 64", "output_tokens: 64\n  concurrency: 4")
    line = line_of(study / "study.yaml", "engine.args.max_num_seqs")
    refused(study, rf"line {line}: engine.args.max_num_seqs: 1 is under workload.concurrency \(4\)")
    edit_study(study, "max_num_seqs: 1", "max_num_seqs: 4")
    check_inputs(read_study(study))
    edit_study(study, "knobs:", "knobs:\n  max_num_seqs: {choices: [8, 2]}")
    refused(study, r"knobs.max_num_seqs: 2 is under workload.concurrency \(4\)")
