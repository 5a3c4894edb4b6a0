"""Texts from elsewhere: what each format gives, and what is said of a file that is none."""

import json

import pytest

from search.errors import UsageError
from search.sources import Conversation, Turn, read_given_prompts, read_given_records

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
TURNS = Conversation((Turn("system", "Be brief."), Turn("user", "Why?")))


def given(path, text):
    path.write_text(text if isinstance(text, str) else "".join(json.dumps(row) + "\n" for row in text))
    return {p.id: p.content for p in read_given_prompts(path)}


def test_a_conversation_of_sharegpt_is_its_first_human_turn(tmp_path):
    rows = [
        {"id": "a", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "first"}]},
        {"conversations": [{"from": "user", "value": "second"}, {"from": "gpt", "value": "…"}]},
    ]
    found = {"a": Conversation((Turn("user", "first"),)), "1": Conversation((Turn("user", "second"),))}
    assert given(tmp_path / "p.json", json.dumps(rows)) == found == given(tmp_path / "p.jsonl", rows)


def test_lines_are_token_ids_text_or_messages_each_as_it_is(tmp_path):
    rows = [
        {"id": "a", "prompt_token_ids": [1, 2], "split": "held-out"},
        {"id": "b", "prompt": "Once"},
        {"messages": ASKED},
    ]
    assert given(tmp_path / "p.jsonl", rows) == {"a": (1, 2), "b": "Once", "2": TURNS}
    assert [p.split for p in read_given_prompts(tmp_path / "p.jsonl")] == ["held-out", "tune", "tune"]


def test_a_log_of_requests_is_what_they_asked_and_not_what_was_answered(tmp_path):
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    rows = [
        {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": ASKED}},
        {"custom_id": "r2", "body": {"prompt": "Once", "max_tokens": 5}},
        {"custom_id": "r3", "body": {"prompt": [1, 2]}},
        {"messages": [*ASKED, {"role": "assistant", "content": "So."}]},
        {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]},
    ]
    assert given(tmp_path / "log", rows) == {"r1": TURNS, "r2": "Once", "r3": (1, 2), "3": TURNS, "4": TURNS}


def test_a_plain_text_is_a_prompt_a_paragraph(tmp_path):
    text = "\ufeffOne,\r\nof two lines.\r\n \r\n\r\nAnother.\n\n\n"
    assert given(tmp_path / "p.txt", text) == {"0": "One,\nof two lines.", "1": "Another."}


def test_records_are_token_ids_or_text(tmp_path):
    rows = [
        {"id": "a", "context_token_ids": [1], "target_token_ids": [2], "split": "held-out"},
        {"context": "One", "target": " two"},
        {"prompt": "One", "completion": " two"},
    ]
    (tmp_path / "r").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [(r.id, r.split, r.context, r.target) for r in read_given_records(tmp_path / "r")]
    assert found == [("a", "held-out", (1,), (2,)), ("1", "gate", "One", " two"), ("2", "gate", "One", " two")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "is not JSON: Expecting value: line 1 column 2"),
        ("[]", "file .* is empty"),
        ('[{"a": 1}]', "item 0: it holds no prompt: prompt_token_ids, prompt, messages"),
        ('[{"conversations": [{"from": "gpt", "value": "x"}]}]', "item 0: it has no turn of a human"),
        ('{"prompt": ""}', "line 1: prompt must be text, and not empty"),
        ('{"prompt": "x"}\n{"prompt": ["x"]}', "line 2: prompt must be a list of token ids"),
        ('{"messages": "x"}', "line 1: messages must be a list"),
        ('{"messages": []}', "line 1: messages ask nothing"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 1: messages ask nothing"),
        ('{"messages": [{"content": "x"}]}', "line 1: message 0 has no role"),
        ('{"messages": [{"role": "user", "content": null}]}', "message 0's content must be text"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "more than text .image_url."),
        ('{"body": 5}', "line 1: body is not an object"),
        ('{"prompt": "\\ud800"}', "line 1: prompt holds half a character"),
        ('{"id": 1, "prompt": "x"}\n{"id": 1, "prompt": "x"}', "line 2: id '1' occurs twice"),
        ("Once upon a time", "line 1: neither JSON Lines nor a JSON list.* ends in .txt"),
    ],
)
def test_what_is_no_prompt_is_refused_at_its_place(tmp_path, text, says):
    with pytest.raises(UsageError, match=says):
        given(tmp_path / "p", text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"context": "x"}', "line 1: target_token_ids is missing, or target or completion as text"),
        ('{"target": "x"}', "line 1: context_token_ids is missing, or context or prompt as text"),
        ('[{"context": 5, "target": "x"}]', "item 0: context must be text"),
    ],
)
def test_what_is_no_record_is_refused_at_its_place(tmp_path, text, says):
    (tmp_path / "r").write_text(text)
    with pytest.raises(UsageError, match=says):
        read_given_records(tmp_path / "r")


def test_a_text_that_is_not_utf_8_is_refused_at_its_line(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"One.\n\nZw\xe4i.\n")
    with pytest.raises(UsageError, match="p.txt, line 3: not UTF-8"):
        read_given_prompts(tmp_path / "p.txt")
