"""Malformed files by the thousand: each is read, or refused in a sentence; none ends in a traceback."""

import json
import random

import pytest
from conftest import STUDY, write_texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_inputs import MANIFEST

from search.data import read_prompts, read_records, read_tasks
from search.engine.protocol import EngineError
from search.errors import SearchError, UsageError
from search.folder import read_manifest
from search.modelfiles import read_config
from search.sources import read_given_prompts, read_given_records
from search.spec import read_study
from search.store import safe_url

PIECES = [
    *(
        b"\0",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\n",
        b"\t",
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b"'",
        b'"',
        b"&a ",
        b"*a",
        b"!!x ",
    ),
    *(b"null", b"true", b"NaN", b".inf", b"-1", b"1e999", b"9" * 30, b"2026-01-01", b"- ", b"? ", b"<<: ", b"\\ud800"),
    *("é".encode(), "\u2028".encode(), b"[" * 2000, b"a" * 5000, b'{"id": 1}', b"%YAML 9.9\n", b"---\n", b"|\n "),
]


def mutations(content, count, seed):
    """Copies of `content` with a few pieces cut, doubled, swapped, overwritten or put in."""
    draw = random.Random(seed)
    for _ in range(count):
        text = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            a, b = sorted((draw.randrange(len(text) + 1), draw.randrange(len(text) + 1)))
            b = min(b, a + 40)
            match draw.randrange(4):
                case 0:
                    del text[a:b]
                case 1:
                    text[a:a] = text[a:b]
                case 2:
                    text[a:b] = draw.choice(PIECES)
                case 3:
                    text[a:a] = bytes(draw.randrange(256) for _ in range(3))
        yield bytes(text)


CASES = {
    "study": (2500, read_study, STUDY.encode()),
    "prompts": (
        2000,
        read_prompts,
        b"".join(b'{"id": "%d", "split": "tune", "prompt_token_ids": [1, 2, 3]}\n' % i for i in range(3)),
    ),
    "tasks": (
        1500,
        read_tasks,
        b'{"id": "a", "prompt": "1 + 1 =", "expected": "2"}\n{"id": 1, "prompt_token_ids": [1], "expected": "x"}\n',
    ),
    "records": (2000, read_records, b'{"id": "a", "context_token_ids": [1], "target_token_ids": [2, 3]}\n'),
    "log": (
        1500,
        read_given_prompts,
        b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}}\n'
        b'{"id": "b", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}\n'
        b'{"prompt": "Once"}\n{"body": {"prompt": [1, 2]}}\n',
    ),
    "given records": (
        1500,
        read_given_records,
        b'{"id": "a", "context": "One", "target": " two"}\n{"prompt": "One", "completion": " two", "split": "gate"}\n',
    ),
    "conversations": (
        1500,
        read_given_prompts,
        b'[{"id": "c", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}]',
    ),
    "manifest": (1500, lambda path: read_manifest(path.parent), json.dumps(MANIFEST).encode()),
    "config": (500, lambda path: read_config(path.parent), b'{"text_config": {"vocab_size": 5}, "sliding_window": 4}'),
}
NAMES = {"study": "study.yaml", "manifest": "manifest.json", "config": "config.json"}


@pytest.mark.parametrize("kind", CASES)
def test_a_malformed_file_is_read_or_refused_in_a_sentence(kind, tmp_path):
    count, read, content = CASES[kind]
    path = tmp_path / NAMES.get(kind, "file")
    refused = 0
    for text in mutations(content, count, seed=kind):
        path.write_bytes(text)
        try:
            read(path)
        except (SearchError, EngineError) as error:
            refused += 1
            assert str(error).strip() and len(str(error)) < 1500
    print(f"{kind}: {count} malformed, {refused} refused")
    assert refused > count / 4


def test_any_bytes_are_a_plain_text_or_refused_in_a_sentence(tmp_path):
    path = tmp_path / "file.txt"
    for text in mutations(b"One paragraph,\nof two lines.\n\nAnother.\r\n \r\nA third.\n", 500, seed="text"):
        path.write_bytes(text)
        try:
            assert all(isinstance(p.content, str) and p.content.strip() for p in read_given_prompts(path))
        except UsageError as error:
            assert "not UTF-8" in str(error) or "is empty" in str(error)


def test_ten_thousand_malformed_inputs_are_tried():
    assert sum(count for count, _, _ in CASES.values()) >= 10_000


@given(st.text(max_size=60))
def test_any_storage_url_is_shown_or_refused(url):
    try:
        safe_url(url)
    except UsageError as error:
        assert "not a database URL" in str(error)


numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=5))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(low=numbers, high=numbers, step=numbers, ratio=numbers, tokens=numbers)
def test_a_study_is_read_as_it_says_or_refused_by_the_key(tmp_path, low, high, step, ratio, tokens):
    study = {
        "name": "s",
        "engine": {"model": "m/m"},
        "knobs": {"sliding_window": {"low": low, "high": high, "step": step}},
        "workload": {"prompts": "p", "output_tokens": tokens},
        "gate": {"records": "r", "ceiling": {"ratio": ratio}},
    }
    (tmp_path / "study.yaml").write_text(json.dumps(study), encoding="utf-8", errors="surrogatepass")
    try:
        spec = read_study(tmp_path)
    except UsageError as error:
        keys = ("sliding_window", "output_tokens", "ratio", "YAML", "UTF-8")
        assert any(key in str(error) for key in keys)
        return
    (knob,) = spec.knobs
    assert 1 <= low == knob.low <= knob.largest <= knob.high == high and step >= 1
    assert spec.gate.ratio == ratio >= 1 and spec.workload.output_tokens == tokens >= 2


records = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.one_of(st.integers(), st.text(max_size=8), st.none()),
            "context_token_ids": st.lists(st.one_of(st.integers(-1, 9), st.floats()), max_size=3),
            "target_token_ids": st.lists(st.integers(0, 9), max_size=3),
        }
    ),
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(records)
def test_records_come_back_as_written_or_are_refused_by_their_line(tmp_path, rows):
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        found = read_records(path)
    except UsageError as error:
        assert "line " in str(error) or "empty" in str(error)
        return
    assert [(r.id, list(r.context), list(r.target)) for r in found] == [
        (str(row["id"]), row["context_token_ids"], row["target_token_ids"]) for row in rows
    ]


def test_the_file_that_is_mutated_is_itself_read(tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY)
    write_texts(tmp_path)
    assert read_study(tmp_path).name == "synthetic"
