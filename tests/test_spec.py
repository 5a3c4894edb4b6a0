import re

import pytest
from conftest import STUDY

from search.errors import UsageError
from search.spec import read_study


def test_a_study_file_becomes_a_spec(study_folder):
    spec = read_study(study_folder)
    assert [k.name for k in spec.knobs] == ["sliding_window", "centroid_top_k", "num_speculative_tokens"]
    assert spec.gate.ratio == 1.05 and spec.gate.ppl is None
    assert len(spec.prompts()) == 24 and len(spec.records()) == 16


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("low: 32, high: 512", "low: 512, high: 32", 7, "high (32) is below low (512)"),
        ("sliding_window:", "sliding_windw:", 7, "did you mean sliding_window"),
        ("centroid_top_k: {low: 1", "centroid_top_k: {low: 0", 8, "must be at least 1, not 0"),
        ("low: 1, high", "lo: 1, high", 8, "centroid_top_k.low is missing"),
        ("high: 128, log: true", "high: 128, logg: true", 8, "did you mean log"),
        ("default: 4", "default: 14", 9, "default (14) is not a value of the range"),
        ("output_tokens: 64", "output_tokens: many", 12, "must be a whole number, not 'many'"),
        ("output_tokens: 64", "precision: 2\n  output_tokens: 64", 12, "workload.precision must be under 1"),
        ("warmup: {prompts", "warm_up: {prompts", 14, "did you mean warmup"),
        ("{ratio: 1.05}", "{ratio: 1.05, ppl: 2.42}", 15, "exactly one of ppl and ratio"),
        ("{ratio: 1.05}", "{ratio: 0.9}", 15, "must be at least 1, not 0.9"),
        ("{ratio: 1.05}", "{ppl: 0.5}", 15, "the least perplexity there is"),
        ("  drafter: example/drafter\n", "", 8, "needs a drafter"),
        ("model: example/model", "model: ./nowhere", 3, "no config.json"),
        ("name: synthetic\n", "nam: synthetic\n", 1, "name is missing"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_key(edit_study, old, new, line, says):
    folder = edit_study(old, new)
    # A key that went missing is reported where its mapping starts; dropping a line moves the rest up by one.
    expected_line = line - 1 if new == "" else line
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        read_study(folder)
    assert f"line {expected_line}:" in str(caught.value)


def test_a_file_that_is_not_yaml_is_one_sentence(study_folder):
    (study_folder / "study.yaml").write_text("name: [unclosed\n")
    with pytest.raises(UsageError, match="not valid YAML"):
        read_study(study_folder)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id": "a", "prompt_token_ids": []}', "must be a list of token ids"),
        ('{"id": "a", "prompt_token_ids": [1, -2]}', "must be a list of token ids"),
        ('{"prompt_token_ids": [1]}', "'id' is missing"),
        ('{"id": "a", "split": "test", "prompt_token_ids": [1]}', "must be 'tune' or 'held-out'"),
        ("nonsense", "line 1"),
    ],
)
def test_a_bad_prompt_is_named_with_its_line(study_folder, line, says):
    (study_folder / "prompts.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match=re.escape(says)):
        read_study(study_folder).prompts()


def test_the_definition_names_what_changed(study_folder):
    before = read_study(study_folder).definition()
    (study_folder / "study.yaml").write_text(STUDY.replace("high: 512", "high: 480"))
    after = read_study(study_folder).definition()
    assert {key for key in before if before[key] != after[key]} == {"knobs.sliding_window"}


def test_concurrency_makes_waves_in_file_order_and_its_default_changes_nothing(study_folder, edit_study):
    before = read_study(study_folder)
    assert [w.id for w in before.waves()] == [p.id for p in before.prompts()]
    spec = read_study(edit_study("output_tokens: 64", "output_tokens: 64\n  concurrency: 5"))
    waves = spec.waves()
    assert [p.id for w in waves for p in w.prompts] == [f"p{i}" for i in range(20)]  # the last four fill none
    assert len({w.id for w in waves}) == 4 and {len(w.prompts) for w in waves} == {5}
    assert spec.workload.wave_tokens == 5 * 64
    assert spec.definition() == {**before.definition(), "workload.concurrency": 5}


def test_too_few_waves_are_refused_at_their_line(edit_study):
    spec = read_study(edit_study("output_tokens: 64", "output_tokens: 64\n  concurrency: 9"))
    with pytest.raises(UsageError, match="line 13: workload.concurrency: 24 tune prompts make 2 waves of 9, and 3"):
        spec.waves()
    with pytest.raises(UsageError, match="2 held-out prompts make 0 waves of 9, and 2"):
        spec.held_out_waves()
