"""Texts made for a study: sampled, taken in from other formats, split into halves."""

import json

import pytest
from conftest import MINIATURE, write_lines

from search import records
from search.data import HELD_OUT, read_prompts, read_records

TARGET = str(MINIATURE / "target")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    write_lines(file, [{"id": f"p{i}", "prompt_token_ids": [i + 1, i + 2]} for i in range(9)])
    return file


def build(prompts, out, *more, engine="simulated", model=TARGET):
    where = ["--prompts", str(prompts), "--out", str(out), "--logs", str(out.parent / "logs")]
    return records.main(
        ["build", "--model", model, "--for", TARGET, *where, "--engine", engine, "--tokens", "12", *more]
    )


def test_records_continue_every_text_and_are_split_into_halves(prompts, tmp_path):
    out = tmp_path / "made" / "records.jsonl"
    assert build(prompts, out) == 0
    made = read_records(out)
    assert [r.context for r in made] == [(i + 1, i + 2) for i in range(9)]
    assert all(len(r.target) == 12 for r in made)
    assert sum(r.split == HELD_OUT for r in made) == 4
    recipe = json.loads((tmp_path / "made" / "records.jsonl.recipe.json").read_text())
    assert (recipe["temperature"], recipe["top_k"], recipe["top_p"], recipe["seed"]) == (1.0, 64, 0.95, 42)


def test_the_same_seed_makes_the_same_records(prompts, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        build(prompts, tmp_path / name, "--seed", seed)
    a, b, c = ((tmp_path / name).read_text() for name in "abc")
    assert a == b != c


def test_a_reference_with_other_tokens_is_refused(prompts, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((MINIATURE / "target" / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 8192}))
    with pytest.raises(SystemExit) as stopped:
        build(prompts, tmp_path / "records.jsonl", model=str(other))
    assert stopped.value.code == 2 and "do not share their tokens" in capsys.readouterr().err
    assert not (tmp_path / "records.jsonl").exists()


def test_a_reference_that_says_nothing_makes_no_records(prompts, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        build(prompts, tmp_path / "records.jsonl", engine="tests.odd_engines:EndsAtOnce")
    assert stopped.value.code == 1 and "nothing to gate with" in capsys.readouterr().err
    assert not (tmp_path / "records.jsonl").exists()


def test_conversations_become_prompts_of_the_models_tokens(tmp_path):
    file = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "def add(a, b):"}, {"from": "gpt", "value": "    return a + b"}]
    file.write_text(json.dumps([{"id": f"c{i}", "conversations": turns} for i in range(4)]))
    assert records.main(["import", "--prompts", str(file), "--model", TARGET, "--out", str(tmp_path / "study")]) == 0
    made = read_prompts(tmp_path / "study" / "prompts.jsonl")
    assert [p.split for p in made].count(HELD_OUT) == 2
    assert tokenizer().decode(made[0].token_ids).endswith("def add(a, b):")


def test_text_needs_to_know_whose_tokens_it_becomes(tmp_path, capsys):
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"conversations": [{"from": "human", "value": "x"}]}]))
    with pytest.raises(SystemExit) as stopped:
        records.main(["import", "--prompts", str(file), "--out", str(tmp_path)])
    assert stopped.value.code == 2 and "say which with --model" in capsys.readouterr().err


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TARGET)


def test_text_becomes_prompts_and_records_of_the_models_tokens(tmp_path):
    write_lines(tmp_path / "log.jsonl", [{"prompt": f"def f{i}():"} for i in range(4)])
    write_lines(tmp_path / "texts.jsonl", [{"context": f"x{i} =", "target": " 1\n"} for i in range(4)])
    files = ["--prompts", str(tmp_path / "log.jsonl"), "--records", str(tmp_path / "texts.jsonl")]
    assert records.main(["import", *files, "--model", TARGET, "--out", str(tmp_path / "study")]) == 0
    prompts = read_prompts(tmp_path / "study" / "prompts.jsonl")
    made = read_records(tmp_path / "study" / "records.jsonl")
    decode = tokenizer().decode
    assert [decode(p.token_ids, skip_special_tokens=True) for p in prompts] == [f"def f{i}():" for i in range(4)]
    assert [decode(r.context, skip_special_tokens=True) for r in made] == [f"x{i} =" for i in range(4)]
    assert {decode(r.target) for r in made} == {" 1\n"}  # with nothing put before it
    assert [p.split for p in prompts].count(HELD_OUT) == [r.split for r in made].count(HELD_OUT) == 2


def test_a_plain_text_is_cut_into_records_that_follow_each_other(tmp_path):
    text = "".join(f"value_{i} = {i * i}\n" for i in range(600))
    (tmp_path / "source.txt").write_text(text)
    arguments = ["import", "--records", str(tmp_path / "source.txt"), "--model", TARGET, "--out", str(tmp_path)]
    assert records.main(arguments) == 0
    made = read_records(tmp_path / "records.jsonl")
    assert len(made) >= 4 and {len(r.target) for r in made} == {256}
    tokens = [token for r in made for token in (*r.context[-512:], *r.target)]
    assert tokens == tokenizer()(text, add_special_tokens=False)["input_ids"][: len(tokens)]
    start = made[0].context[:-512]
    assert all(r.context[:-512] == start for r in made)
    assert list(start) == [tokenizer().bos_token_id] * len(start)


def test_a_text_too_short_to_be_cut_is_said(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("x = 1\n")
    with pytest.raises(SystemExit, match="2"):
        records.main(["import", "--records", str(tmp_path / "short.txt"), "--model", TARGET, "--out", str(tmp_path)])
    assert "short.txt is too short" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path, capsys):
    (tmp_path / "p.txt").write_text("x = 1\n")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    (broken / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(SystemExit, match="2"):
        records.main(["import", "--prompts", str(tmp_path / "p.txt"), "--model", str(broken), "--out", str(tmp_path)])
    assert f"The tokenizer of {broken} cannot be loaded" in capsys.readouterr().err


def test_a_split_that_is_there_stays_and_what_is_not_split_is_split(tmp_path):
    rows = [{"id": i, "context_token_ids": [1], "target_token_ids": [2]} for i in range(6)]
    write_lines(tmp_path / "plain.jsonl", rows)
    write_lines(tmp_path / "split.jsonl", [{**row, "split": "held-out" if row["id"] == 5 else "gate"} for row in rows])
    for name, held_out in (("plain", 3), ("split", 1)):
        records.main(["import", "--records", str(tmp_path / f"{name}.jsonl"), "--out", str(tmp_path / name)])
        made = read_records(tmp_path / name / "records.jsonl")
        assert [r.split for r in made].count(HELD_OUT) == held_out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["import", "--out", "x"], "needs --prompts, --records or both"),
        (["build", "--model", "a", "--for", "a", "--prompts", "p", "--out", "o", "--tokens", "0"], "at least 1"),
        (["build", "--model", "a", "--for", "a", "--prompts", "p", "--out", "o", "--arg", "x"], "NAME=VALUE"),
    ],
)
def test_a_wrong_argument_is_one_sentence(words, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        records.main(words)
    assert stopped.value.code == 2 and says in capsys.readouterr().err
